"""One text read at once, by whoever has it from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import millrace
from millrace import parse_tool_calls, split_reasoning
from millrace.errors import SetupError
from millrace.text.formats import by_name, names
from millrace.text.reading import described

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "format", "found"),
    [
        ("<think>\nhm\n</think>\n\nHi", None, ("hm", "Hi")),
        ("hm</think>Hi", None, ("hm", "Hi")),
        ("Hi", None, ("", "Hi")),
        ("", None, ("", "")),
        ("[THINK]hm[/THINK]Hi", "mistral", ("hm", "Hi")),
        ("<think>hm</think>Hi", "hermes", ("hm", "Hi")),
        ("<think>hm</think>Hi", "none", ("", "<think>hm</think>Hi")),
        ("<think>cut of", None, ("cut of", "")),
    ],
)
def test_thoughts_and_answer_come_apart(
    text: str, format: str | None, found: tuple[str, str]
) -> None:
    assert split_reasoning(text, format) == found


def test_calls_come_out_with_their_arguments() -> None:
    content, calls = parse_tool_calls(f"<think>x</think>Well: {CALL}\n{CALL}", [LOOK])
    assert (
        content == "Well:"
        and [(c.name, c.arguments) for c in calls] == [("look", {"at": "sky"})] * 2
    )
    assert len({c.id for c in calls}) == 2
    (call,) = parse_tool_calls('[look(at="sky")]', [LOOK], "pythonic").calls
    assert (call.name, call.arguments) == ("look", {"at": "sky"})


def test_no_tool_no_call() -> None:
    assert parse_tool_calls(CALL, []).calls == []
    other = parse_tool_calls(CALL.replace("look", "rm"), [LOOK])
    assert other.calls == [] and "rm" in other.content


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="klingon"):
        split_reasoning("x", "klingon")


@pytest.mark.parametrize("name", names())
def test_every_format_reads_any_text_and_says_what_it_is(name: str) -> None:
    for text in ("", "plain", CALL, "<think>a</think>b", '{"name": "look"', "[look(", "</think>"):
        split_reasoning(text, name)
        parse_tool_calls(text, [LOOK], name)
    told = described(by_name(name))
    assert told.startswith("tool calls: ") and "; reasoning: " in told


def test_they_are_where_users_look_for_them() -> None:
    assert {"parse_tool_calls", "split_reasoning", "LLM"} <= set(millrace.__all__)
    with pytest.raises(AttributeError):
        _ = millrace.split_everything  # type: ignore[attr-defined]
