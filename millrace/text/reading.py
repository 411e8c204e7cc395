"""One text read at once, as answers are read while they are made: its thoughts, its calls, the rest.

For programs that have a model's text from elsewhere. Knows nothing of requests or engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millrace.text.deltas import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from millrace.text.formats import (
    OutputFormat,
    OutputParser,
    ThoughtSyntax,
    by_name,
    detect,
    names,
    thought_by_name,
)
from millrace.text.formats.thoughts import THOUGHTS
from millrace.text.formats.tools import tool_from_openai


class SplitText(NamedTuple):
    reasoning: str
    content: str


class FoundCall(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]


class CallsInText(NamedTuple):
    content: str
    calls: list[FoundCall]


def split_reasoning(text: str, format: str | OutputFormat | None = None) -> SplitText:
    """What a model thought, and what it said.

    `format` is the name of a tool or reasoning format (docs/formats.md); left out, the text's own
    markers tell. A thought whose opening marker stood in the prompt is one too.
    """
    pieces = _pieces(text, _format(text, format), [])
    return SplitText(_joined(pieces, Reasoning), _joined(pieces, Content))


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]], format: str | OutputFormat | None = None
) -> CallsInText:
    """The calls of these tools (in OpenAI's shape) in a text, and what else it says.

    A call of another tool is content. Thoughts are left out.
    """
    pieces = _pieces(text, _format(text, format), tools)
    started = [p for p in pieces if isinstance(p, ToolCallStart)]
    arguments = [""] * len(started)
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            arguments[piece.index] += piece.text
    calls = [
        FoundCall(call.id, call.name, json.loads(arguments[call.index] or "{}")) for call in started
    ]
    return CallsInText(_joined(pieces, Content), calls)


def described(format: OutputFormat) -> str:
    """In a line, how a model marks its calls and its thoughts."""
    opens = [mark for syntax in format.calls for mark in syntax.opens if mark]
    calls = f"{format.name} ({' '.join(dict.fromkeys(opens))})" if opens else format.name
    if not format.calls and format.messages is None:
        calls = "none"
    thoughts = "none"
    if format.thought is not None:
        thought = format.thought
        thoughts = f"{thought.name} ({thought.opens[0]} … {thought.closes[0]})"
    elif format.messages is not None:
        thoughts = f"{format.name} (messages of their own)"
    return f"tool calls: {calls}; reasoning: {thoughts}"


def _format(text: str, wanted: str | OutputFormat | None) -> OutputFormat:
    if isinstance(wanted, OutputFormat):
        return wanted
    if wanted is None:
        found = detect(text)
        if found.thought is None and found.messages is None:
            found = found.with_thought(next((t for t in THOUGHTS if _begins(t, text)), None))
        return found
    if wanted in names():
        found = by_name(wanted)
        return (
            found if found.thought or found.messages else found.with_thought(detect(text).thought)
        )
    return by_name("plain").with_thought(thought_by_name(wanted))


def _begins(thought: ThoughtSyntax, text: str) -> bool:
    return text.lstrip().startswith(thought.opens)


def _pieces(text: str, format: OutputFormat, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
    specs = [tool_from_openai(t) for t in tools]
    parser = OutputParser(format, specs or None, prompt=_opening(text, format))
    return [*parser.feed(text), *parser.finish()]


def _opening(text: str, format: OutputFormat) -> str:
    """The opening marker, where a thought ends that did not begin in the text."""
    if format.thought is None:
        return ""
    ends = [text.find(mark) for mark in format.thought.closes if mark in text]
    begins = [text.find(mark) for mark in format.thought.opens if mark in text]
    unopened = ends and (not begins or min(ends) < min(begins))
    return format.thought.opens[0] if unopened else ""


def _joined(pieces: Sequence[Piece], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(p.text for p in pieces if isinstance(p, kind))
