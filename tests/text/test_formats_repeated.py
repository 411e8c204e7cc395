"""A parameter that is written twice in one call counts once, however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_support import SPECS, answer_to, cut, fold, read

from millrace.text.deltas import ToolCallArguments
from millrace.text.formats import OutputParser, by_name, names
from millrace.text.formats.call_encoder import Call, write_calls
from millrace.text.formats.unique_keys import HELD, UniqueKeys

LONG = "a place with a name that is longer than what waits"


def twice(family: str, first: str, second: str, between: dict[str, Any]) -> tuple[str, str]:
    """A call that gives `city` two values, and the prompt before it."""
    format = by_name(family)
    arguments = {"city": first, **between, "other": second}
    text = write_calls(format, [Call("get_weather", arguments, "abcdefgh1")])
    prompt = format.primers[0] if format.messages is not None else ""
    return text.replace("other", "city"), prompt


def strict(text: str) -> Any:
    """What JSON text says; a key that comes twice in an object is an error."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), text
        return dict(pairs)

    return json.loads(text, object_pairs_hook=members)


@pytest.mark.parametrize("family", names())
def test_the_last_of_two_short_values_counts(family: str) -> None:
    text, prompt = twice(family, "Bern", "Basel", {})
    answer = answer_to(by_name(family), text, prompt=prompt)
    assert answer.names == ["get_weather"]
    assert strict(answer.arguments[0]) == {"city": "Basel"}


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("first", [LONG, "Bern"], ids=["long", "short"])
def test_a_value_that_was_passed_on_stays(family: str, first: str) -> None:
    between = {} if first == LONG else {"count": 2}
    text, prompt = twice(family, first, "Basel", between)
    answer = answer_to(by_name(family), text, prompt=prompt)
    assert strict(answer.arguments[0]) == {"city": first, **between}


@pytest.mark.parametrize("family", ["hermes", "glm", "qwen3-coder", "lfm2", "deepseek-v4"])
def test_every_cut_leaves_each_key_once(family: str) -> None:
    text, _ = twice(family, "Bern", "Basel", {"count": 2})
    for size in range(len(text)):
        for truncated in (False, True):
            answer = fold(read(by_name(family), [text[:size]], truncated=truncated))
            assert fold(read(by_name(family), list(text[:size]), truncated=truncated)) == answer
            if not truncated:
                assert all(isinstance(strict(a), dict) for a in answer.arguments)


def test_numbers_and_objects_too() -> None:
    body = (
        '{"name": "get_weather", "arguments": {"count": 1, "count": 2, "opts": {"days": 1, '
        '"days": 2}, "tags": ["a"], "tags": [], "count": 3}}'
    )
    answer = answer_to(by_name("hermes"), f"<tool_call>{body}</tool_call>")
    assert strict(answer.arguments[0]) == {"count": 2, "opts": {"days": 2}, "tags": []}


def test_a_key_in_other_letters_is_the_same_key() -> None:
    body = '{"name": "get_weather", "arguments": {"city": "Bern", "c\\u0069ty": "Biel"}}'
    answer = answer_to(by_name("hermes"), f"<tool_call>{body}</tool_call>")
    assert strict(answer.arguments[0]) == {"city": "Biel"}


def test_short_values_come_in_one_piece_each() -> None:
    text = (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern", "count": 2, "ratio": 1}}'
    )
    pieces = read(by_name("hermes"), list(text))
    assert [p.text for p in pieces if isinstance(p, ToolCallArguments)] == [
        "{",
        '"city": "Bern"',
        ', "count": 2',
        ', "ratio": 1}',
    ]


def test_the_object_opens_at_once_and_long_values_stream() -> None:
    parser = OutputParser(by_name("qwen3-coder"), SPECS)
    pieces = parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert ToolCallArguments(0, "{") in pieces
    assert parser.feed("x" * HELD) == [ToolCallArguments(0, '"city": "' + "x" * HELD)]
    assert parser.feed("yz") == [ToolCallArguments(0, "yz")]


texts = st.sampled_from(["", "a", 'x"y', "\\", "{,}", "雪", "z" * 20, "\n"])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.floats(-9, 9), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=4).map(tuple),
    ),
    max_leaves=12,
)


def written(value: Any, indent: str) -> str:
    """JSON text, in which a tuple of pairs is an object that may have a key twice."""
    if isinstance(value, tuple):
        members = (f'"{key}": {written(item, indent)}' for key, item in value)
        return "{" + indent + f",{indent or ' '}".join(members) + indent + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(item, indent) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def passed(chunks: list[str]) -> str:
    found: list[str] = []
    keys = UniqueKeys(found.append)
    for chunk in chunks:
        keys(chunk)
    keys.end()
    return "".join(found)


@settings(max_examples=300, deadline=None)
@given(
    members=st.lists(st.tuples(st.sampled_from("abcd"), values), max_size=5),
    indent=st.sampled_from(["", "\n  ", " "]),
    seed=st.integers(0, 1000),
)
def test_chunks_make_no_difference_to_which_value_counts(
    members: list[tuple[str, Any]], indent: str, seed: int
) -> None:
    text = written(tuple(members), indent)
    whole = passed([text])
    assert passed(list(text)) == passed(cut(text, random.Random(seed), 6)) == whole
    assert strict(whole).keys() == {key for key, _ in members}
    try:
        strict(text)
    except AssertionError:
        return
    assert whole == text
