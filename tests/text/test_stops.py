"""Stop strings against a plain str.find oracle, over every way to cut the text into chunks."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.errors import BadRequest
from millrace.text.stops import StopMatcher, parse_stops

ALPHABET = "abc é\n"
texts = st.text(ALPHABET, max_size=40)
longs = st.sampled_from([0, 2, 256])
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=5)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    found = [(text.find(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[: start + len(stop) if include else start], stop


def cut(text: str, points: list[int]) -> list[str]:
    borders = [0, *sorted(p % (len(text) + 1) for p in points), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


def made(stops: list[str], include: bool, long: int) -> StopMatcher:
    """A matcher to which texts of more than `long` characters are long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace.text.stops.LONG", long)
        return StopMatcher(stops, include)


def run(
    chunks: list[str], stops: list[str], include: bool, long: int = 256
) -> tuple[str, str | None]:
    matcher = made(stops, include, long)
    out = ""
    for chunk in chunks:
        result = matcher.feed(chunk)
        out += result.text
        if result.matched is not None:
            assert matcher.feed("more").text == ""
            return out, result.matched
    last = matcher.finish()
    return out + last.text, last.matched


@settings(max_examples=400, deadline=None)
@given(texts, stop_lists, st.booleans(), st.lists(st.integers(0, 100), max_size=12), longs)
@example("abce", ["abcd", "bc"], False, [], 3)
@example("ab", ["ab", "abc"], False, [1], 2)
@example("aab", ["ab", "aac"], False, [1, 2], 2)
@example("aabaaab", ["aaab", "ba"], False, [], 3)
def test_equals_the_oracle_however_it_is_cut(
    text: str, stops: list[str], include: bool, points: list[int], long: int
) -> None:
    assert run(cut(text, points), stops, include, long) == oracle(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(texts, stop_lists, longs)
def test_nothing_that_may_become_a_stop_is_released(text: str, stops: list[str], long: int) -> None:
    matcher = made(stops, False, long)
    released = ""
    for i, char in enumerate(text):
        released += matcher.feed(char).text
        if matcher.matched is not None:
            return
        for stop in stops:
            for size in range(1, len(stop)):
                if text[: i + 1].endswith(stop[:size]):
                    assert len(released) <= i + 1 - size


@settings(max_examples=200, deadline=None)
@given(texts, stop_lists, longs)
def test_what_cannot_become_a_stop_is_released_at_once(
    text: str, stops: list[str], long: int
) -> None:
    matcher = made(stops, False, long)
    released = 0
    for i, char in enumerate(text):
        released += len(matcher.feed(char).text)
        if matcher.matched is not None:
            return
        assert i + 1 - released <= max((len(s) for s in stops), default=0)


def test_linear_time_on_a_hostile_text() -> None:
    stops = ["a" * size + "b" for size in range(1, 64)]
    began = time.thread_time()
    matcher = StopMatcher(stops, False)
    for _ in range(200):
        matcher.feed("a" * 1000)
    assert matcher.finish().matched is None
    assert time.thread_time() - began < 20  # of this thread's own work, not of the clock


def test_a_stop_of_megabytes_costs_what_is_written() -> None:
    stops = ["a" * 8_000_000 + str(n) for n in range(64)]
    began = time.thread_time()
    matcher = StopMatcher(stops, False)
    assert matcher.feed("a" * 200).text == ""
    assert matcher.feed("b").text == "a" * 200 + "b"
    assert time.thread_time() - began < 5


def test_validation() -> None:
    assert parse_stops(None) == []
    assert len(parse_stops("long" * 100_000)[0]) == 400_000
    assert parse_stops("6") == ["6"]
    assert parse_stops(["a", "b", "a"]) == ["a", "b"]
    assert len(parse_stops([str(i) for i in range(64)])) == 64
    for bad in ("", ["a", ""], 6, ["a", 6], {"a": 1}, [str(i) for i in range(65)]):
        with pytest.raises(BadRequest) as error:
            parse_stops(bad)
        assert error.value.param == "stop"
        assert "stop" in error.value.message
