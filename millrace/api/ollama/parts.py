"""From deltas to parts of an Ollama message: text, thought, and calls once they are complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.protocol import TokenLogprob
from millrace.serving.fold import ToolCall
from millrace.text.deltas import (
    Content,
    Delta,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
)
from millrace.text.embedded import mended


@dataclass
class OllamaPart:
    """A piece of the message, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)

    def __iadd__(self, other: OllamaPart) -> OllamaPart:
        self.content += other.content
        self.thinking += other.thinking
        self.calls += other.calls
        self.scores += other.scores
        return self

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.scores)


class OllamaReader:
    """Deltas to parts. A call is told when it is complete, since its arguments are an object."""

    def __init__(self) -> None:
        self._call: ToolCall | None = None
        self._count = 0
        self._scores: list[TokenLogprob] = []
        self.tokens: list[int] = []
        self.finish: TextFinish | None = None

    def read(self, delta: Delta) -> OllamaPart:
        self.tokens += delta.tokens
        self._scores += delta.logprobs
        part = OllamaPart()
        match delta.piece:
            case ToolCallArguments(text=text):
                assert self._call is not None
                self._call.arguments += text
                return part
            case ToolCallStart(id=id, name=name):
                self._close(part)
                self._call = ToolCall(id, name)
                return part
            case Content(text=text):
                self._close(part)
                part.content = text
            case Reasoning(text=text):
                self._close(part)
                part.thinking = text
            case TextFinish() as finish:
                self._close(part)
                self.finish = finish
        part.scores, self._scores = self._scores, []
        return part

    def _close(self, part: OllamaPart) -> None:
        """Put the call that was being made into the part; one cut off by the limit is no call."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            arguments = mended(call.arguments or "{}")
        except ValueError:
            return
        function = {"index": self._count, "name": call.name, "arguments": arguments}
        part.calls.append({"id": call.id, "function": function})
        self._count += 1


Shape = Callable[[OllamaPart], dict[str, Any]]
"""How a part looks to the clients of an endpoint."""


def as_message(part: OllamaPart) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def as_response(part: OllamaPart) -> dict[str, Any]:
    return {"response": part.content} | ({"thinking": part.thinking} if part.thinking else {})
