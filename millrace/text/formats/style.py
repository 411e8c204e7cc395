"""What a chat template does with messages, found by rendering small probes.

Templates disagree on roles, argument types, empty contents and reasoning; reading their source is
guesswork, so each question is asked by rendering it. Owns the questions, not the answers' use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from millrace.errors import BadRequest, ModelError
from millrace.text.formats.detect import thinking_controls

Message = dict[str, Any]


class Template(Protocol):
    """The part of a chat template that is asked here."""

    source: str

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True)
class Style:
    """How messages must look for one template."""

    system: bool = True
    late_system: bool = True
    developer: bool = False
    alternate: bool = False
    user_first: bool = False
    """The conversation must begin with a user's turn."""
    parts: Literal["flatten", "keep", "require"] = "flatten"
    tools: bool = True
    calls: bool = True
    results: bool = True
    said_after_results: bool = True
    """A user's message may follow the results of tools."""
    mapping: bool = True
    """Arguments as an object, not as JSON text."""
    no_content: Literal["empty", "none", "absent"] = "empty"
    content_with_calls: bool = True
    one_call: bool = False
    reasoning: str | None = None
    """The key under which earlier reasoning is rendered; "parts" for parts of the content."""
    reasoning_or_content: bool = False
    short_ids: bool = False
    functions: bool = False
    """Tools are wanted as JSON text in the variable `functions`."""


_USER: Message = {"role": "user", "content": "q1u"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "d9d",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "k9k"}},
            "required": ["probe_key"],
            "additionalProperties": False,
        },
    },
}
_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")


class _Probe:
    def __init__(self, template: Template) -> None:
        self._template = template
        self._extra = thinking_controls(template.source).arguments(enabled=True)
        self._always_tools = False
        self.functions = False
        if self.text([_USER]) is None:
            self._always_tools = self.text([_USER], tools=True) is not None
        if self.text([_USER]) is None:
            self._extra |= {"functions": "[]", "datetime": ""}
            self.functions = self.text([_USER]) is not None

    def text(self, messages: Sequence[Message], tools: bool = False) -> str | None:
        try:
            return self._template.render(
                messages,
                tools=[_TOOL] if tools or self._always_tools else None,
                add_generation_prompt=False,
                **self._extra,
            )
        except (BadRequest, ModelError):
            return None

    def shows(self, messages: Sequence[Message], *texts: str, tools: bool = False) -> bool:
        found = self.text(messages, tools)
        return found is not None and all(text in found for text in texts)


def probe(template: Template) -> Style:
    """The style of a template; costs some thirty small renders, so keep the answer."""
    ask = _Probe(template)
    system = ask.shows([{"role": "system", "content": "s1s"}, _USER], "s1s", "q1u")
    answer: Message = {"role": "assistant", "content": "a1a"}
    late: Message = {"role": "system", "content": "s2s"}
    again: Message = {"role": "user", "content": "q2u"}
    developer: Message = {"role": "developer", "content": "d1d"}
    first: list[Message] = [{"role": "system", "content": "s1s"}] if system else []
    mapping, calls = _arguments(ask)
    no_content = _no_content(ask, mapping) if calls else "empty"
    short = calls and not _calls_shown(ask, mapping, no_content, "call_0123456789abcdef", ["one_a"])
    ids = "abcdefgh{}" if short else "call_{}"
    one = calls and not _calls_shown(ask, mapping, no_content, ids, ["one_a", "two_b"])
    key, exclusive = _reasoning(ask, mapping, no_content, calls, ids)
    return Style(
        system=system,
        # Some templates keep the last system message only.
        late_system=ask.shows(
            [*first, _USER, answer, late, again], "s2s", "q2u", *(m["content"] for m in first)
        ),
        developer="developer" in template.source and ask.shows([developer, _USER], "d1d", "q1u"),
        alternate=not ask.shows([_USER, again], "q1u", "q2u"),
        user_first=ask.shows([_USER, answer, again], "a1a", "q2u")
        and not ask.shows([answer, again], "a1a", "q2u"),
        parts=_parts(ask),
        tools=ask.shows([_USER], "probe_tool", tools=True),
        calls=calls,
        results=_results(ask, mapping, no_content, ids)
        if calls
        else ask.shows([_USER, answer, {"role": "tool", "content": "r1r", "name": "one_a"}], "r1r"),
        said_after_results=not calls or _results(ask, mapping, no_content, ids, again),
        mapping=mapping,
        no_content=no_content,
        content_with_calls=not calls
        or ask.shows([_USER, _call(mapping, ids, ["one_a"], "c1c")], "one_a", "c1c"),
        one_call=one,
        reasoning=key,
        reasoning_or_content=exclusive,
        short_ids=short,
        functions=ask.functions,
    )


def _call(mapping: bool, ids: str, names: Sequence[str], content: Any = "", **more: Any) -> Message:
    arguments: Any = {"probe_key": "v1v"} if mapping else '{"probe_key": "v1v"}'
    calls = [
        {
            "id": ids.format(index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, name in enumerate(names)
    ]
    message: Message = {"role": "assistant", "content": content, "tool_calls": calls, **more}
    if content is _ABSENT:
        del message["content"]
    return message


_ABSENT = object()
_CONTENTS: tuple[tuple[Literal["empty", "none", "absent"], Any], ...] = (
    ("empty", ""),
    ("none", None),
    ("absent", _ABSENT),
)


def _arguments(ask: _Probe) -> tuple[bool, bool]:
    """Whether arguments are wanted as an object, and whether calls are rendered at all."""
    escaped = re.compile(r"\\\"probe_key|\{'probe_key'")
    for mapping in (True, False):
        for _, content in _CONTENTS:
            for ids in ("call_{}", "abcdefgh{}"):
                text = ask.text([_USER, _call(mapping, ids, ["one_a"], content)], tools=True)
                said = (text or "").rpartition("q1u")[2]
                if "v1v" in said and not escaped.search(said):
                    return mapping, True
    return True, False


def _no_content(ask: _Probe, mapping: bool) -> Literal["empty", "none", "absent"]:
    for name, content in _CONTENTS:
        for ids in ("call_{}", "abcdefgh{}"):
            text = ask.text([_USER, _call(mapping, ids, ["one_a"], content)], tools=True)
            said = (text or "").rpartition("q1u")[2]
            if "v1v" in said and "None" not in said:
                return name
    return "empty"


def _calls_shown(
    ask: _Probe, mapping: bool, no_content: str, ids: str, names: Sequence[str]
) -> bool:
    content = dict(_CONTENTS)[no_content]
    messages: list[Message] = [_USER, _call(mapping, ids, names, content)]
    for index, name in enumerate(names):
        messages.append(
            {"role": "tool", "tool_call_id": ids.format(index), "name": name, "content": "r1r"}
        )
    return ask.shows(messages, *names, tools=True) or ask.shows(messages[:2], *names, tools=True)


def _results(ask: _Probe, mapping: bool, no_content: str, ids: str, *then: Message) -> bool:
    content = dict(_CONTENTS)[no_content]
    result: Message = {
        "role": "tool",
        "tool_call_id": ids.format(0),
        "name": "one_a",
        "content": "r1r",
    }
    messages = [_USER, _call(mapping, ids, ["one_a"], content), result, *then]
    return ask.shows(messages, "r1r", *(m["content"] for m in then), tools=True)


def _reasoning(
    ask: _Probe, mapping: bool, no_content: str, calls: bool, ids: str
) -> tuple[str | None, bool]:
    content = dict(_CONTENTS)[no_content]
    for key in _KEYS:
        thought = {key: "t1t"}
        if calls and ask.shows(
            [_USER, _call(mapping, ids, ["one_a"], content, **thought)], "t1t", tools=True
        ):
            both = [_USER, _call(mapping, ids, ["one_a"], "c1c", **thought)]
            return key, ask.text(both, tools=True) is None
        if ask.shows([_USER, {"role": "assistant", "content": "a1a", **thought}], "t1t"):
            return key, False
    parts = [{"type": "thinking", "thinking": "t1t"}, {"type": "text", "text": "a1a"}]
    shown = ask.text([_USER, {"role": "assistant", "content": parts}])
    if shown is not None and "t1t" in shown and not re.search(r"['\"]type['\"]", shown):
        return "parts", False
    return None, False


def _parts(ask: _Probe) -> Literal["flatten", "keep", "require"]:
    listed = ask.text([{"role": "user", "content": [{"type": "text", "text": "p1p"}]}])
    kept = listed is not None and "p1p" in listed and not re.search(r"['\"]type['\"]", listed)
    if kept and not ask.shows([_USER], "q1u"):
        return "require"
    return "keep" if kept else "flatten"
