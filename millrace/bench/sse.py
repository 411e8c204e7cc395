"""Server-sent events of an OpenAI-compatible stream, from bytes to what the load generator times.

Pure: bytes in, typed chunks out. It knows which fields carry generated text, and that a role, an
empty string or a keep-alive comment is none.
"""

from __future__ import annotations

import msgspec

DONE = b"[DONE]"


class ReportedUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """One event: whether it carries generated text, and what it says about the end."""

    text: bool = False
    finish_reason: str | None = None
    usage: ReportedUsage | None = None
    error: str | None = None


class Events:
    """Splits a byte stream into the data of its events, however the bytes are cut."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        *lines, self._line = (self._line + received).split(b"\n")
        events = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_Event)


def read_chunk(data: bytes) -> StreamChunk:
    """The event's meaning; raises `msgspec.MsgspecError` when it is not OpenAI's shape."""
    event = _DECODER.decode(data)
    if bytes(event.error) != b"null":
        return StreamChunk(error=error_text(bytes(event.error)))
    choices = event.choices or []
    return StreamChunk(
        text=any(_has_text(choice) for choice in choices),
        finish_reason=next((c.finish_reason for c in choices if c.finish_reason), None),
        usage=_usage(event.usage) if event.usage else None,
    )


def error_text(body: bytes) -> str:
    """The sentence in an error body, whether it is OpenAI's shape, another, or no JSON at all."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        if body.lstrip().startswith(b"<"):
            return "It answered with a web page and not as an API does."
        return body.decode("utf-8", "replace").strip()[:300]
    for _ in range(2):
        if isinstance(value, dict):
            value = value.get("error") or value.get("message") or value.get("detail") or value
    return str(value)[:300]


def _has_text(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    if delta is None:
        return False
    if delta.content or delta.reasoning_content or delta.reasoning or delta.refusal:
        return True
    calls = [call.function for call in delta.tool_calls or [] if call.function]
    return any(function.name or function.arguments for function in calls)


def _usage(usage: _Usage) -> ReportedUsage:
    details = usage.prompt_tokens_details
    return ReportedUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=details.cached_tokens if details else None,
    )
