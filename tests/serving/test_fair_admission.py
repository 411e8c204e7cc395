"""Admission by caller: one caller may use all the room, and none can take another's share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.caller import current_caller
from millrace.errors import Overloaded
from millrace.protocol import Choice, Submit
from millrace.serving.admission import Admission
from millrace.serving.in_flight import InFlight
from millrace.serving.request_table import RequestTable


@pytest.fixture(autouse=True)
def _caller() -> Iterator[None]:
    before = current_caller.set("")
    yield
    current_caller.reset(before)


def _admits(admission: Admission, caller: str, present: dict[str, int], wanted: int) -> bool:
    before = current_caller.set(caller)
    try:
        admission.check(present, wanted)
    except Overloaded:
        return False
    finally:
        current_caller.reset(before)
    return True


def test_one_caller_may_use_all_the_room() -> None:
    admission = Admission(max_running=2, max_queue=4)
    assert _admits(admission, "a", {"a": 5}, 1)
    assert not _admits(admission, "a", {"a": 6}, 1)


def test_a_second_caller_gets_its_share_of_a_full_room() -> None:
    admission = Admission(max_running=2, max_queue=4)
    assert _admits(admission, "b", {"a": 6}, 3)
    assert not _admits(admission, "b", {"a": 6}, 4)
    assert not _admits(admission, "a", {"a": 6, "b": 1}, 1)
    assert _admits(admission, "c", {"a": 6, "b": 3}, 2)


def test_a_refusal_counts_the_callers_own_answers() -> None:
    current_caller.set("b")
    with pytest.raises(Overloaded, match="9 answers are running or waiting, 3 of them yours"):
        Admission(max_running=2, max_queue=4).check({"a": 6, "b": 3}, 1)


def test_reserved_places_are_the_callers_own() -> None:
    admission = Admission(max_running=2, max_queue=4)
    current_caller.set("a")
    with admission.reserve(6) as came:
        assert not _admits(admission, "a", {}, 1)
        assert _admits(admission, "b", {}, 3)
        came(2)
        assert _admits(admission, "a", {}, 2)
    assert not admission.reserved


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 4)), max_size=200))
def test_the_total_is_bounded_and_shares_are_kept(asked: list[tuple[str, int]]) -> None:
    admission = Admission(max_running=8, max_queue=32)
    present: Counter[str] = Counter()
    for caller, wanted in asked:
        own = present[caller]
        admitted = _admits(admission, caller, +present, wanted)
        callers = len((+present).keys() | {caller})
        if own + wanted <= admission.room // callers:
            assert admitted
        if admitted:
            present[caller] += wanted
    assert present.total() <= admission.room * sum(1 / k for k in range(1, 9))


def test_callers_take_turns_at_the_engine() -> None:
    requests = RequestTable()
    numbers = iter(range(1, 100))

    def add(caller: str, count: int) -> list[int]:
        current_caller.set(caller)
        added = [_request(next(numbers)) for _ in range(count)]
        for active in added:
            requests.add(active)
        return [a.number for a in added]

    running = add("a", 2)
    for number in running:
        requests.sent(requests[number])
    first, second = add("a", 4), add("b", 3)
    assert list(requests.in_turns([*first, *second])) == [
        *(second[0], second[1]),
        *(first[0], second[2]),
        *first[1:],
    ]


def _request(number: int) -> InFlight:
    submit = Submit(number, [1], [Choice(0, 0, [])], 4)
    return InFlight(f"r{number}", submit, lambda active: None, idle=1.0)
