"""The machine's promises, for every family: chunk invariance, no leaks, whose calls are passed on."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_support import HOSTILE, SPECS, counter, cut, fold, read

from millrace.text.deltas import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from millrace.text.formats import (
    OutputFormat,
    OutputParser,
    by_name,
    inside_thought,
    names,
)
from millrace.text.formats.call_encoder import Call, write_calls

FORMATS = [by_name(name) for name in names()]
WEATHER_CALL = Call("get_weather", HOSTILE, "abcdefgh1")
PING_CALL = Call("ping", {}, "abcdefgh2")
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def prompt_for(format: OutputFormat) -> str:
    return format.primers[0] if format.messages is not None else ""


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of one kind as one, so that only chunk borders are forgotten."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        match (last, piece):
            case (Content(a), Content(b)):
                found[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                found[-1] = Reasoning(a + b)
            case (ToolCallArguments(i, a), ToolCallArguments(j, b)) if i == j:
                found[-1] = ToolCallArguments(i, a + b)
            case _:
                found.append(piece)
    return found


def fragments(format: OutputFormat) -> list[str]:
    calls = write_calls(format, [WEATHER_CALL, PING_CALL])
    unknown = write_calls(format, [Call("nobody", {"a": 1}, "abcdefgh3")])
    markers = sorted(format.markers)
    halves = [marker[: len(marker) // 2] for marker in markers]
    pieces = [calls[i : i + 7] for i in range(0, len(calls), 7)]
    words = ["Hello", " ", "\n", "\n\n", "é雪😀", "<", "{", "[", "```", '"', "a < b", ", ", "name"]
    return [calls, calls, unknown, *markers, *halves, *pieces, *words]


@formats
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_make_no_difference(format: OutputFormat, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(format)), max_size=10)))
    truncated = data.draw(st.booleans())
    prompt = prompt_for(format)
    seed = data.draw(st.integers(0, 1000))
    whole = joined(read(format, [text], prompt=prompt, truncated=truncated))
    chunks = cut(text, random.Random(seed), 6)
    assert joined(read(format, chunks, prompt=prompt, truncated=truncated)) == whole
    assert joined(read(format, list(text), prompt=prompt, truncated=truncated)) == whole


@formats
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_marker_reaches_the_content(format: OutputFormat, data: st.DataObject) -> None:
    good = [
        write_calls(format, [WEATHER_CALL, PING_CALL]),
        write_calls(format, [Call("nobody", {"a": 1}, "abcdefgh3")]),
        *sorted(format.markers),
        "Hello there. ",
        "5 is more.\n",
    ]
    parts = data.draw(st.lists(st.sampled_from(good), max_size=8))
    tools = data.draw(st.sampled_from([SPECS, None]))
    text = "".join(parts)
    pieces = read(format, cut(text, random.Random(len(text)), 5), tools, prompt=prompt_for(format))
    content = fold(pieces).content
    for marker in format.markers:
        assert marker not in content
    if tools is None:
        assert fold(pieces).names == []


@formats
def test_two_calls(format: OutputFormat) -> None:
    text = write_calls(format, [WEATHER_CALL, PING_CALL])
    pieces = read(format, list(text), prompt=prompt_for(format))
    answer = fold(pieces)
    assert answer.calls == [("get_weather", HOSTILE), ("ping", {})]
    assert answer.content == ""
    assert len(set(answer.ids)) == 2
    assert [p.index for p in pieces if isinstance(p, ToolCallStart)] == [0, 1]


@formats
def test_arguments_stream_before_the_call_is_complete(format: OutputFormat) -> None:
    call = Call("get_weather", {"city": "a long name of a place, and more of it"}, "abcdefgh1")
    text = write_calls(format, [call])
    parser = OutputParser(format, SPECS, prompt=prompt_for(format), new_id=counter())
    half = text[: text.index("and more")]
    pieces = [piece for char in half for piece in parser.feed(char)]
    assert sum(isinstance(piece, ToolCallArguments) for piece in pieces) > 5
    assert "a long name of" in fold(pieces).arguments[0]


@formats
def test_a_tool_nobody_offered_is_content(format: OutputFormat) -> None:
    text = write_calls(format, [Call("nobody", {"secret": 1}, "abcdefgh1")])
    answer = fold(read(format, list(text), prompt=prompt_for(format)))
    assert answer.names == []
    assert "secret" in answer.content


@formats
def test_without_tools_nothing_is_a_call(format: OutputFormat) -> None:
    text = write_calls(format, [Call("ping", {"secret": 1}, "abcdefgh1")])
    answer = fold(read(format, list(text), None, prompt=prompt_for(format)))
    assert answer.names == []
    assert "secret" in answer.content


@formats
def test_content_around_calls_keeps_its_words(format: OutputFormat) -> None:
    if format.messages is not None:
        pytest.skip("content is a message of its own here")
    text = "First.\n\n" + write_calls(format, [PING_CALL]) + "\n"
    answer = fold(read(format, list(text)))
    assert answer.content == "First."
    assert answer.calls == [("ping", {})]


@formats
def test_every_cut_of_a_call_leaks_nothing(format: OutputFormat) -> None:
    text = write_calls(format, [WEATHER_CALL, PING_CALL])
    for size in range(len(text)):
        answer = fold(read(format, [text[:size]], prompt=prompt_for(format), truncated=True))
        assert all(marker not in answer.content for marker in format.markers)
        assert len(answer.content) < 12
        assert all(name in ("get_weather", "ping") for name in answer.names)


@formats
def test_an_answer_that_ends_inside_a_call_still_holds_json(format: OutputFormat) -> None:
    text = write_calls(format, [WEATHER_CALL])
    for size in range(len(text)):
        answer = fold(read(format, [text[:size]], prompt=prompt_for(format)))
        for arguments in answer.arguments:
            assert isinstance(json.loads(arguments), dict)


@formats
def test_one_call_only_when_parallel_calls_are_off(format: OutputFormat) -> None:
    text = write_calls(format, [WEATHER_CALL, PING_CALL])
    answer = fold(read(format, list(text), prompt=prompt_for(format), parallel=False))
    assert answer.names == ["get_weather"]


@formats
def test_plain_text_passes_unchanged(format: OutputFormat) -> None:
    text = "  Hello, *world*: 5 < 6, x[0] = {1: 2}\n\n```py\nprint('a')\n```\n  \n"
    if format.messages is not None:
        text_in = format.messages.message + text
        found = fold(read(format, list(text_in), prompt=prompt_for(format))).content
        assert found.rstrip() == text.strip()
    else:
        assert fold(read(format, list(text))).content == text


@formats
def test_interleaved_parsers_share_nothing(format: OutputFormat) -> None:
    text = write_calls(format, [WEATHER_CALL, PING_CALL])
    parsers = [OutputParser(format, SPECS, prompt=prompt_for(format)) for _ in range(2)]
    found: list[list[Piece]] = [[], []]
    for char in text:
        for parser, pieces in zip(parsers, found, strict=True):
            pieces += parser.feed(char)
    for parser, pieces in zip(parsers, found, strict=True):
        pieces += parser.finish()
    first, second = (fold(pieces) for pieces in found)
    assert first.calls == second.calls == [("get_weather", HOSTILE), ("ping", {})]


THINKERS = [format for format in FORMATS if format.thought is not None]
thinkers = pytest.mark.parametrize("format", THINKERS, ids=lambda format: format.name)


@thinkers
def test_reasoning_then_content(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    text = f"{thought.opens[0]}\nHm, 5 < 6.\n{thought.closes[0]}\n\nThe answer."
    for seed in range(20):
        answer = fold(read(format, cut(text, random.Random(seed), 4)))
        assert (answer.reasoning, answer.content) == ("Hm, 5 < 6.", "The answer.")


@thinkers
def test_the_prompt_may_open_the_thought(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    prompt = f"<user>hi<assistant>{thought.opens[0]}\n"
    assert inside_thought(format, prompt)
    assert not inside_thought(format, prompt + thought.closes[0])
    text = f"Hm.\n{thought.closes[0]}Yes."
    answer = fold(read(format, list(text), prompt=prompt))
    assert (answer.reasoning, answer.content) == ("Hm.", "Yes.")


@thinkers
def test_a_thought_without_an_end_is_all_reasoning(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    answer = fold(read(format, list(f"{thought.opens[0]}Hm, hm."), truncated=True))
    assert (answer.reasoning, answer.content) == ("Hm, hm.", "")


@thinkers
def test_a_call_ends_a_thought_that_was_left_open(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    text = f"{thought.opens[0]}I will ping.\n" + write_calls(format, [PING_CALL])
    answer = fold(read(format, list(text)))
    assert answer.calls == [("ping", {})]
    assert answer.reasoning == "I will ping."


def test_an_answer_that_the_prompt_began() -> None:
    parser = OutputParser(by_name("hermes"))
    parser.prime("<think>Hm, \n")
    pieces = parser.feed("yes.</think> Fine.") + parser.finish()
    assert pieces == [Reasoning("yes."), Content("Fine.")]


def test_thinking_is_known_while_it_lasts() -> None:
    parser = OutputParser(by_name("hermes"))
    seen = []
    for chunk in ("<think>", "a", "</think>", "b"):
        parser.feed(chunk)
        seen.append(parser.thinking)
    assert seen == [True, True, False, False]


@formats
def test_a_spent_budget_ends_the_thought(format: OutputFormat) -> None:
    close = format.thinking_close
    if close is None:
        return
    if format.thought is not None:
        opening = format.thought.opens[0]
    elif format.messages is not None and format.messages.self_recipient:
        opening = f" to={format.messages.self_recipient}{format.messages.message}"
    else:
        opening = "<|channel|>analysis<|message|>"
    answer = fold(read(format, list(f"{opening}Hm{close}Yes."), prompt=prompt_for(format)))
    assert (answer.reasoning, answer.content) == ("Hm", "Yes.")
