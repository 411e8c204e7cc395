"""The cases that parsers of tool calls are commonly tested with, for every family alike.

Texts are written in the family's own markup and read back whole, by characters, by tokens, in
large chunks, and with every mark in one chunk with the text after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_support import SPECS, Answer, fold, function, read

from millrace.text.formats import OutputFormat, ToolSpec, by_name, names, tool_from_openai
from millrace.text.formats.call_encoder import Call, write_calls

FORMATS = [by_name(name) for name in names()]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
THINKERS = [format for format in FORMATS if format.thought is not None]
thinkers = pytest.mark.parametrize("format", THINKERS, ids=lambda format: format.name)
TOOL = tool_from_openai(
    function(
        "f",
        {
            "text": {"type": "string"},
            "whole": {"type": "integer"},
            "part": {"type": "number"},
            "yes": {"type": "boolean"},
            "maybe": {"type": ["string", "null"]},
            "many": {"type": "array"},
            "object": {"type": "object"},
            "free": {},
        },
    )
)
TOOLS = [TOOL, *SPECS]
PING = Call("ping", {}, "abcdefgh9")
_TOKEN = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]+\]|\s?\w+|\s+|[^\w\s]")


def prompt_for(format: OutputFormat) -> str:
    return format.primers[0] if format.messages is not None else ""


def tokens(text: str) -> list[str]:
    """The text in pieces as a tokenizer makes them: whole marks, words, single signs."""
    return _TOKEN.findall(text)


def glued(text: str) -> list[str]:
    """Chunks that begin with a mark and hold the text after it."""
    return [part for part in re.split(r"(?=[<\[{])", text) if part]


def said(
    format: OutputFormat,
    text: str,
    tools: Sequence[ToolSpec] = TOOLS,
    *,
    prompt: str | None = None,
    truncated: bool = False,
) -> Answer:
    """What a text says, after a look that every way to cut it says the same."""
    prompt = prompt_for(format) if prompt is None else prompt
    whole = fold(read(format, [text], tools, prompt=prompt, truncated=truncated))
    pieces = (list(text), tokens(text), glued(text), re.findall(r"(?s).{1,40}", text))
    for chunks in pieces:
        assert "".join(chunks) == text
        assert fold(read(format, chunks, tools, prompt=prompt, truncated=truncated)) == whole
    return whole


def message(format: OutputFormat, text: str) -> str:
    """Content as the family writes it, before a call."""
    if format.messages is None:
        return text
    channel = f"{format.messages.header[0]}commentary" if format.messages.header else " to=user"
    ends = format.messages.ends[0] + format.messages.start + "assistant"
    return f"{channel}{format.messages.message}{text}{ends}"


VALUES: dict[str, list[Any]] = {
    "text": [
        "", " ", "  two  ", "line\nline\n\nline", "\ttab", 'say "hi"', "it's", "back\\slash \\n",
        "ünï 雪 😀 \u200d", "<b>bold</b> & &lt;i&gt;", "a < b > c", "{\"a\": [1, 2]}", "[1, 2]", "42",
        "true", "null", "None", "a, b=c; d)", "]", "}", "```py\nx\n```", "https://x.y/?a=1&b=2#c",
        "C:\\dir\\new", "x" * 300, "-", "$HOME/${x}", "%s %d", "/* c */ // d", "ö" * 20,
    ],
    "whole": [0, -7, 12345678901234567890],
    "part": [0.5, -1.25, 3, 1e-7],
    "yes": [True, False],
    "maybe": [None, "x"],
    "many": [[], [1, [2, {"a": None}]], ["a b", "c,d"], [{"x": "y"}]],
    "object": [{}, {"a": {"b": {"c": [True, None]}}}, {"key with space": "v", "ü": 1}],
    "free": [1, {"a": [1]}, False],
}  # fmt: skip


def writable(format: OutputFormat, key: str) -> bool:
    """Elements in elements have no empty lists or objects, and no keys that are not words."""
    return format.name != "minimax-m3" or key not in ("many", "object", "free")


@formats
@pytest.mark.parametrize("key", VALUES)
def test_values(format: OutputFormat, key: str) -> None:
    for value in VALUES[key] if writable(format, key) else []:
        text = write_calls(format, [Call("f", {"whole": 1, key: value}, "abcdefgh1")])
        answer = said(format, text)
        assert (answer.content, answer.names) == ("", ["f"]), value
        arguments = answer.calls[0][1]
        assert arguments[key] == value, text
        assert type(arguments[key]) is type(value)


@formats
def test_three_calls(format: OutputFormat) -> None:
    calls = [
        PING,
        Call("f", {"text": "a"}, "abcdefgh1"),
        Call("get_weather", {"city": "b"}, "id2345678"),
    ]
    answer = said(format, write_calls(format, calls))
    assert answer.calls == [("ping", {}), ("f", {"text": "a"}), ("get_weather", {"city": "b"})]
    assert len(set(answer.ids)) == 3
    assert answer.content == ""


@formats
def test_text_before_between_and_after(format: OutputFormat) -> None:
    call = write_calls(format, [PING])
    if format.messages is not None:
        start = format.messages.start + "assistant"
        text = message(format, "One.") + call + start + message(format, "Two.") + call
        answer = said(format, text)
        assert answer.names == ["ping", "ping"]
        assert "".join(answer.content.split()) == "One.Two."
        return
    answer = said(format, f"One.\n\n{call}\n\nTwo.\n\n{call}\n\nThree.")
    assert answer.names == ["ping", "ping"]
    assert answer.content.split() == ["One.", "Two.", "Three."]


@formats
def test_an_unknown_tool_between_two_known_ones(format: OutputFormat) -> None:
    calls = [
        PING,
        Call("nobody", {"secret": "x"}, "abcdefgh1"),
        Call("f", {"text": "a"}, "id2345678"),
    ]
    answer = said(format, write_calls(format, calls))
    assert answer.calls == [("ping", {}), ("f", {"text": "a"})]
    assert "secret" in answer.content
    assert not any(marker in answer.content for marker in format.markers)


@formats
def test_a_call_without_its_end(format: OutputFormat) -> None:
    text = write_calls(format, [Call("f", {"text": "a place"}, "abcdefgh1")])
    for size in range(text.index("a place") + 7, len(text) + 1):
        answer = said(format, text[:size])
        assert answer.names == ["f"], text[:size]
        assert answer.calls[0][1]["text"].startswith("a place")
        # A few characters of a mark are text: nothing says that they are more.
        assert len(answer.content) < 12


@formats
def test_a_call_that_a_limit_cut(format: OutputFormat) -> None:
    text = write_calls(format, [PING, Call("f", {"text": "a place", "whole": 12}, "abcdefgh1")])
    for size in range(0, len(text), 3):
        answer = said(format, text[:size], truncated=True)
        assert not any(marker in answer.content for marker in format.markers)
        assert set(answer.names) <= {"ping", "f"}


@thinkers
def test_reasoning_and_calls(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    opens, closes = thought.opens[0], thought.closes[0]
    call = write_calls(format, [PING])
    for text, prompt, content, reasoning in (
        (f"{opens}Hm.{closes}{call}", "", "", "Hm."),
        (f"{opens}\nHm.\n{closes}\n\nWell.\n{call}", "", "Well.", "Hm."),
        (f"Hm.\n{closes}\n{call}", opens, "", "Hm."),
        (f"{opens}Hm.{closes}Well.", opens, "Well.", "Hm."),
        (f"{opens}{closes}{call}", "", "", ""),
        (f"{opens}\n\n{closes}\n\nWell.", "", "Well.", ""),
        (f"{opens}Hm.{call}", "", "", "Hm."),
        (f"Hm.{call}", opens, "", "Hm."),
        (f'{opens}Hm, 1 < 2 & "x" {{}} [].{closes}{call}', "", "", 'Hm, 1 < 2 & "x" {} [].'),
        (f"{call}{opens}Hm.{closes}Well.", "", "Well.", "Hm."),
    ):
        answer = said(format, text, prompt=prompt)
        assert (answer.content, answer.reasoning) == (content, reasoning), text
        assert answer.names == (["ping"] if call in text else [])


@thinkers
def test_two_thoughts_and_one_in_another(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    opens, closes = thought.opens[0], thought.closes[0]
    answer = said(format, f"{opens}a{closes}b{opens}c{closes}d", prompt="")
    assert (answer.reasoning, answer.content) == ("ac", "bd")
    answer = said(format, f"{opens}a{opens}b{closes}c", prompt="")
    assert (answer.reasoning, answer.content) == ("ab", "c")


@thinkers
def test_a_thought_that_a_limit_cut_anywhere(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    text = f"{thought.opens[0]}One two.{thought.closes[0]}Three."
    for size in range(len(thought.opens[0]), len(text)):
        answer = said(format, text[:size], prompt="", truncated=True)
        assert "One two.".startswith(answer.reasoning)
        assert "Three.".startswith(answer.content)


@formats
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_mix_of_these_is_the_same_in_any_chunks(
    format: OutputFormat, data: st.DataObject
) -> None:
    calls = st.sampled_from(
        [
            write_calls(format, [Call("f", {key: value, "text": "t"}, "abcdefgh1")])
            for key in VALUES
            for value in VALUES[key][:6]
        ]
    )
    thought = format.thought
    marks = [*thought.opens, *thought.closes] if thought is not None else [" "]
    noise = st.sampled_from([*marks, "Well. ", "\n\n", "{", '"', "functions.", "</", "```json\n"])
    text = "".join(data.draw(st.lists(st.one_of(calls, noise), max_size=6)))
    said(format, text, truncated=data.draw(st.booleans()))
