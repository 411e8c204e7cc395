"""Rate limits: the buckets by themselves, with a clock of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import RateLimited
from millrace.serving.limits import RateLimits

STEPS = st.lists(
    st.tuples(st.floats(0, 30, allow_nan=False), st.integers(0, 400)), min_size=1, max_size=120
)
"""Seconds since the last request, and the tokens it turns out to cost."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(STEPS, st.integers(1, 50))
def test_no_stretch_of_time_grants_more_than_its_share(
    steps: list[tuple[float, int]], limit: int
) -> None:
    clock = Clock()
    limits = RateLimits(limit, None, clock)
    granted: list[float] = []
    for pause, _ in steps:
        clock.now += pause
        try:
            limits.admit("a")
        except RateLimited:
            continue
        granted.append(clock.now)
    for i, first in enumerate(granted):
        for k, last in enumerate(granted[i:], 1):
            assert k <= limit + limit * (last - first) / 60 + 1e-6


@given(STEPS, st.integers(1, 50), st.integers(1, 500))
def test_a_refused_caller_is_let_in_when_it_was_told(
    steps: list[tuple[float, int]], requests: int, tokens: int
) -> None:
    clock = Clock()
    limits = RateLimits(requests, tokens, clock)
    for pause, cost in steps:
        clock.now += pause
        try:
            limits.admit("a")
        except RateLimited as refused:
            assert refused.retry_after > 0
            assert any(s.remaining == 0 for s in limits.standings("a"))
            clock.now += refused.retry_after
            limits.admit("a")
        limits.charge("a", cost)


@given(STEPS, st.integers(1, 500))
def test_tokens_are_lent_once_and_paid_back(steps: list[tuple[float, int]], limit: int) -> None:
    clock = Clock()
    limits = RateLimits(None, limit, clock)
    start, spent = clock.now, 0
    for pause, cost in steps:
        clock.now += pause
        try:
            limits.admit("a")
        except RateLimited:
            continue
        assert spent <= limit + limit * (clock.now - start) / 60 + 1e-6
        limits.charge("a", cost)
        spent += cost


@given(STEPS)
def test_one_callers_use_is_not_anothers(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    limits = RateLimits(3, 10, clock)
    for pause, cost in steps:
        clock.now += pause
        try:
            limits.admit("greedy")
        except RateLimited:
            pass
        limits.charge("greedy", cost)
    assert [s.remaining for s in limits.standings("modest")] == [3, 10]
    limits.admit("modest")


def test_a_refusal_names_the_limit_and_costs_nothing() -> None:
    clock = Clock()
    limits = RateLimits(2, None, clock)
    limits.admit("a")
    limits.admit("a")
    for _ in range(3):
        with pytest.raises(RateLimited, match="2 requests per minute.*--rate-requests.*30 s"):
            limits.admit("a")
    clock.now += 30
    limits.admit("a")


def test_a_clock_that_goes_back_grants_nothing() -> None:
    clock = Clock()
    limits = RateLimits(1, None, clock)
    limits.admit("a")
    clock.now -= 500
    with pytest.raises(RateLimited):
        limits.admit("a")
    clock.now += 560
    limits.admit("a")


def test_callers_of_the_past_are_forgotten() -> None:
    clock = Clock()
    limits = RateLimits(1, None, clock)
    for number in range(20_000):
        clock.now += 0.5
        limits.admit(str(number))
    assert len(limits._callers) < 2000


def test_no_limit_is_no_limit() -> None:
    assert not RateLimits(None, None)
    assert RateLimits(None, 5)


def test_a_request_without_tokens_is_held_to_the_limit_of_requests_alone() -> None:
    limits = RateLimits(2, 10, Clock())
    limits.charge("a", 100)
    with pytest.raises(RateLimited, match="--rate-tokens"):
        limits.admit("a")
    limits.admit("a", tokens=False)
    limits.admit("a", tokens=False)
    with pytest.raises(RateLimited, match="--rate-requests"):
        limits.admit("a", tokens=False)
    RateLimits(None, 10, Clock()).admit("a", tokens=False)
