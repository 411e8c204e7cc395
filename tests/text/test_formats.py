"""The machine's promises, for every family: chunk invariance, no leaks, whose calls are passed on."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_support import HOSTILE, PING, SPECS, WEATHER, counter, cut, fold, function, read

from millrace.errors import SetupError
from millrace.text.deltas import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from millrace.text.formats import (
    OutputFormat,
    OutputParser,
    by_name,
    choose,
    detect,
    inside_thought,
    names,
    thought_by_name,
    thought_names,
    tool_from_openai,
)
from millrace.text.formats.writing import Call, write_calls

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


def test_thinking_is_known_while_it_lasts() -> None:
    parser = OutputParser(by_name("hermes"))
    seen = []
    for chunk in ("<think>", "a", "</think>", "b"):
        parser.feed(chunk)
        seen.append(parser.thinking)
    assert seen == [True, True, False, False]


def test_arguments_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"city": "Bern"}, "name": "get_weather"}</tool_call>'
    assert fold(read(by_name("hermes"), list(text))).calls == [("get_weather", {"city": "Bern"})]


def test_arguments_as_json_inside_a_string() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"B\\u00e9\\"}"}</tool_call>'
    assert fold(read(by_name("hermes"), list(text))).calls == [("get_weather", {"city": "Bé"})]


def test_sloppy_json_comes_out_strict() -> None:
    body = (
        '{"name": "get_weather", "arguments": {"city": "a\nb\\d", "hourly": True, "tags": ["x",],}}'
    )
    answer = fold(read(by_name("hermes"), list(f"<tool_call>{body}</tool_call>")))
    assert answer.calls == [("get_weather", {"city": "a\nb\\d", "hourly": True, "tags": ["x"]})]


def test_both_forms_of_mistral() -> None:
    for text in (
        '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "abcdefghi"}]',
        "[TOOL_CALLS]ping[ARGS]{}",
        "[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}",
        "[TOOL_CALLS]ping{}",
    ):
        assert fold(read(by_name("mistral"), list(text))).calls == [("ping", {})]
    assert fold(
        read(by_name("mistral"), [text.replace("ping{", "ping[CALL_ID]abcdefghi[ARGS]{")])
    ).ids == ["abcdefghi"]


def test_kimi_keeps_its_own_ids() -> None:
    text = write_calls(by_name("kimi-k2"), [PING_CALL, PING_CALL])
    assert fold(read(by_name("kimi-k2"), [text])).ids == ["functions.ping:0", "functions.ping:1"]


LLAMA = by_name("llama-3")


def test_bare_json_is_a_call_only_of_an_offered_tool() -> None:
    call = '{"name": "get_weather", "parameters": {"city": "Bern"}}'
    assert fold(read(LLAMA, list(call))).calls == [("get_weather", {"city": "Bern"})]
    assert fold(read(LLAMA, list(f"{call}; {call}"))).names == ["get_weather"] * 2
    for other in (
        '{"name": "Ann", "parameters": {}}',
        '{"name": "get_weather"}',
        '{"a": 1}',
        "{ x }",
    ):
        answer = fold(read(LLAMA, list(other)))
        assert (answer.names, answer.content) == ([], other)
    assert fold(read(LLAMA, list(call), None)).content == call


def test_python_tag() -> None:
    text = '<|python_tag|>get_weather.call(city="Bern", count=2)<|eom_id|>'
    assert fold(read(LLAMA, list(text))).calls == [("get_weather", {"city": "Bern", "count": 2})]


def fence(body: str) -> Any:
    return fold(read(by_name("gemma-3"), list(f"Sure.\n```tool_code\n{body}\n```\n")))


def test_gemma_fences() -> None:
    want = [("get_weather", {"city": "Bern"})]
    assert fence("get_weather(city='Bern')").calls == want
    assert fence("print(get_weather('Bern'))").calls == want
    assert fence("get_weather Bern").calls == want
    assert fence('[get_weather(city="Bern")]').calls == want
    assert fence("get_weather(city='Bern')\nping()").names == ["get_weather", "ping"]
    answer = fence("other(1)")
    assert answer.content == "Sure.\n```tool_code\nother(1)\n```\n"


def test_types_come_from_the_schema() -> None:
    tool = tool_from_openai(
        function(
            "f",
            {
                "text": {"type": "string"},
                "whole": {"type": "integer"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["integer", "string"]},
                "listed": {"$ref": "#/$defs/names"},
                "free": {},
            },
        )
    )
    defs = {**tool.parameters, "$defs": {"names": {"type": "array"}}}
    tool = type(tool)("f", defs)
    values = {
        "text": "12",
        "whole": "3.0",
        "maybe": "null",
        "either": "x1",
        "listed": "['a']",
        "free": "tr",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = fold(read(by_name("qwen3-coder"), list(text), [tool])).calls
    assert call == (
        "f",
        {"text": "12", "whole": 3, "maybe": None, "either": "x1", "listed": ["a"], "free": "tr"},
    )


def test_names_and_overrides() -> None:
    assert by_name("hermes").name == "hermes"
    assert choose("<tool_call>", tool_format="glm", reasoning_format="mistral").name == "glm"
    assert choose("<tool_call>", reasoning_format="mistral").thought == thought_by_name("mistral")
    assert choose("<tool_call> </think>", reasoning_format="none").thought is None
    assert len(names()) == len(set(names()))
    assert len(thought_names()) == len(set(thought_names()))
    for ask in (by_name, thought_by_name):
        with pytest.raises(SetupError, match="hermes|think"):
            ask("nonsense")


def test_detection_without_the_real_templates() -> None:
    assert detect("{{ messages }}").name == "plain"
    assert detect('<tool_call>\n{"name"').name == "hermes"
    assert detect("<tool_call><function=x><parameter=y>").name == "qwen3-coder"
    assert detect("<tool_call>x<arg_key>").name == "glm"
    assert detect("", {"<tool_call>", "<think>", "</think>"}).thought == thought_by_name("think")
    assert detect("<start_of_turn>").python_tools
    format = detect("x", {"<|im_end|>", "<|endoftext|>"})
    assert fold(read(format, ["Hi<|im_", "end|>"])).content == "Hi"


def test_tool_shapes() -> None:
    assert tool_from_openai(WEATHER).required == ("city",)
    assert tool_from_openai(PING).properties == {}
