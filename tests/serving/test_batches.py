"""Requests with thousands of prompts: one bound, linear folds, and turns for the event loop in between."""

from __future__ import annotations

import asyncio
import time

import pytest

from millrace.errors import BadRequest, Overloaded, RateLimited
from millrace.protocol import Choice, RowTokens, Submit
from millrace.serving.admission import Admission
from millrace.serving.arrivals import Arrivals
from millrace.serving.batches import MOST_PROMPTS, PromptCount, check_count, prompts_in
from millrace.serving.group import Group, firsts
from millrace.serving.in_flight import InFlight
from millrace.serving.limits import RateLimits
from millrace.serving.request_table import RequestTable
from millrace.serving.slices import SLICE, SlicePace, in_slices
from millrace.serving.suspicion import Cause, Milestone, Suspicion
from millrace.text.deltas import Delta, TextFinish, Usage

MANY = 20_000
GENEROUS = 20.0
"""Seconds for a linear pass over so many on a busy machine; a quadratic one takes minutes."""


class Member:
    """A request with two choices, each of one token, that are there already."""

    n = 2

    def __init__(self) -> None:
        self.idle = 60.0
        self.on_arrival = lambda: None
        self.is_over = False
        self.closed = 0

    @property
    def source(self) -> Member:
        return self

    def unread(self):  # type: ignore[no-untyped-def]
        self.is_over = True
        yield from (Delta(choice, TextFinish("stop"), [], [7]) for choice in range(self.n))
        yield Usage(3, 2)


def test_a_group_of_twenty_thousand_is_folded_in_linear_time() -> None:
    async def scene() -> None:
        group = Group([Member() for _ in range(MANY)])  # type: ignore[misc]
        began = time.monotonic()
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        events = [event async for event in group.events()]
        beside.cancel()
        assert time.monotonic() - began < GENEROUS
        assert [e.choice for e in events if isinstance(e, Delta)] == list(range(2 * MANY))
        assert events[-1] == Usage(3 * MANY, 2 * MANY)
        assert turns > 10  # others ran in between

    asyncio.run(scene())


def test_where_each_member_begins() -> None:
    assert firsts([2, 1, 3]) == [0, 2, 3]
    assert firsts([]) == []


def test_a_reader_of_many_looks_only_at_those_that_have_something() -> None:
    async def scene() -> None:
        requests = [in_flight(str(n), n) for n in range(1, MANY + 1)]
        arrivals = Arrivals(requests)
        seen = [await arrivals.next() for _ in requests]
        assert seen == list(range(MANY))  # each once at the beginning
        for at in (700, 3, 700):
            requests[at].take(RowTokens(1, 0, [5]))
        assert [await arrivals.next(), await arrivals.next()] == [700, 3]
        assert [len(list(requests[at].unread())) for at in (700, 3)] == [2, 1]
        requests[9].fail(Overloaded("x"))
        assert await arrivals.next() == 9
        with pytest.raises(Overloaded):
            list(requests[9].unread())

    asyncio.run(scene())


def in_flight(id: str, number: int) -> InFlight:
    submit = Submit(number, [1], [Choice(0, 0)], 5)
    return InFlight(id, submit, lambda _: None, idle=60.0)


def test_requests_are_found_counted_and_let_go_of_without_a_look_at_the_others() -> None:
    book = RequestTable()
    parts = [in_flight(f"group#{n}", n) for n in range(MANY)]
    began = time.monotonic()
    for part in parts:
        assert not book.is_taken(part.id, "")
        book.add(part)
        assert book.is_taken(part.id, "") and book.is_taken("group", "")
        assert book.unanswered == len(book)
    assert book.named("group") == parts and book.named("group#5") == [parts[5]]
    book.add(alone := in_flight("alone", MANY))
    assert (
        book.is_taken("alone", "")
        and book.is_taken("alone#1", "")
        and not book.is_taken("group#20000", "")
    )
    for part in parts:
        book.sent(part)
        book.answered(part)
    assert list(book.unsent) == [MANY] and book.unanswered == 1
    book.engine_gone()
    assert len(book.unsent) == MANY + 1
    for part in parts:
        book.remove(part)
    assert time.monotonic() - began < GENEROUS
    assert (
        list(book.values()) == [alone] and not book.is_taken("group", "") and len(book.unsent) == 1
    )


def test_a_death_with_twenty_thousand_requests_is_sorted_out_in_linear_time() -> None:
    suspicion = Suspicion()
    began = time.monotonic()
    stood = {n: Milestone(n % 2, 1) for n in range(MANY)}
    for _ in range(2):  # the second time they are parted
        assert suspicion.died(stood, [], Cause.CRASH) == {}
    order = suspicion.order(stood)
    assert sum(map(suspicion.may_run, order)) == MANY // 2
    assert [suspicion.ended(n) for n in order[: MANY // 2]].count(True) == 1
    assert time.monotonic() - began < GENEROUS


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_long_loops_leave_turns_to_others() -> None:
    async def scene() -> None:
        done: list[int] = []

        def work(number: int) -> None:
            busy(SLICE / 4)
            done.append(number)
            if number == 5:
                raise ValueError("one of them fails")

        in_slices(range(40), work)
        assert 0 < len(done) < 40
        while len(done) < 40:
            await asyncio.sleep(0)
        assert done == list(range(40))
        turns = 0

        async def others() -> None:
            nonlocal turns
            for _ in range(1000):
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        pace = SlicePace()
        for _ in range(8):
            busy(SLICE)
            await pace.rest()
        assert turns >= 6
        beside.cancel()

    asyncio.run(scene())


def test_one_bound_for_prompts_and_for_answers() -> None:
    check_count(PromptCount(MOST_PROMPTS, "text", MOST_PROMPTS))
    with pytest.raises(BadRequest, match=f"'text' has 12000 items.*{MOST_PROMPTS}") as refused:
        check_count(PromptCount(12_000, "text"))
    assert refused.value.param == "text"
    with pytest.raises(BadRequest, match=f"{MOST_PROMPTS + 1} answers.*{MOST_PROMPTS}"):
        check_count(PromptCount(1, "text", MOST_PROMPTS + 1))


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (None, 1),
        ("a", 1),
        ([], 1),
        ([1, 2, 3], 1),
        (["a", "b"], 2),
        ([[1], [2], [3]], 3),
        ([True], 1),
    ],
)
def test_what_counts_as_a_prompt(given: object, count: int) -> None:
    assert prompts_in(given) == count  # type: ignore[arg-type]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def left(limits: RateLimits) -> int:
    return limits.standings("a")[0].remaining


def test_each_prompt_is_a_request_of_the_limit() -> None:
    limits = RateLimits(10, None, clock := Clock())
    limits.admit("a")
    limits.admit_prompts("a", 6, "prompt")
    assert left(limits) == 4
    limits.admit("a")
    with pytest.raises(RateLimited, match="6 prompts") as refused:
        limits.admit_prompts("a", 6, "prompt")
    assert left(limits) == 4  # a refused request is free
    clock.now += refused.value.retry_after
    limits.admit("a")
    limits.admit_prompts("a", 6, "prompt")
    assert left(limits) == 0


def test_more_prompts_than_the_limit_ever_grants_are_an_error_and_no_wait() -> None:
    limits = RateLimits(10, None, Clock())
    limits.admit("a")
    with pytest.raises(BadRequest, match="11 prompts.*10 requests per minute") as refused:
        limits.admit_prompts("a", 11, "prompt")
    assert refused.value.param == "prompt"
    RateLimits(None, 5, Clock()).admit_prompts("a", 11, "prompt")  # no limit of requests


def test_places_are_kept_for_requests_that_come_one_after_the_other() -> None:
    admission = Admission(max_running=2, max_queue=4)
    with admission.reserve(4) as came:
        admission.check({}, 2)
        with pytest.raises(Overloaded):
            admission.check({}, 3)
        came(1)
        admission.check({"": 1}, 2)  # it is among those that are present now
        with pytest.raises(Overloaded):
            admission.check({"": 1}, 3)
    admission.check({"": 1}, 5)
    assert not admission.reserved
