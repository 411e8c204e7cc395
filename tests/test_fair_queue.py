"""Queues that are fair by caller: shares of time, short work first, limits per caller."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.caller import current_caller
from millrace.errors import Overloaded
from millrace.fair_executor import FairExecutor
from millrace.fair_queue import FairQueue, QueueFull


def queue(per_caller: int = 100, total: int = 1000) -> FairQueue[str]:
    return FairQueue(per_caller=per_caller, total=total)


def test_a_caller_with_one_entry_does_not_wait_behind_another_callers_twenty() -> None:
    q = queue()
    for i in range(20):
        q.push("a", f"a{i}", now=0.0)
    first = q.pop()
    assert first is not None and first.item == "a0"
    q.push("b", "b0", now=1.0)
    q.end("a", 5.0)
    following = q.pop()
    assert following is not None and following.item == "b0"


def test_within_a_caller_short_work_goes_first_until_long_work_has_waited() -> None:
    q = queue()
    q.push("a", "long", now=0.0, expected=10.0)
    q.push("a", "short", now=1.0, expected=0.1)
    q.push("a", "late", now=20.0, expected=0.1)
    assert [e.item for e in (q.pop(), q.pop(), q.pop()) if e] == ["short", "long", "late"]


def test_a_full_queue_takes_a_place_from_the_caller_with_the_most() -> None:
    q = queue(per_caller=10, total=4)
    for i in range(4):
        q.push("a", f"a{i}", now=float(i))
    _, displaced = q.push("b", "b0", now=9.0)
    assert displaced is not None and displaced.item == "a3"
    with pytest.raises(QueueFull):
        q.push("a", "a4", now=10.0)
    assert len(q) == 4 and q.waiting("b") == 1


def test_the_limit_per_caller_refuses_the_longest_of_that_caller() -> None:
    q = queue(per_caller=2)
    q.push("a", "x", now=0.0, expected=9.0)
    q.push("a", "y", now=0.0, expected=1.0)
    with pytest.raises(QueueFull):
        q.push("a", "z", now=0.0, expected=20.0)
    _, displaced = q.push("a", "w", now=0.5, expected=0.0)
    assert displaced is not None and displaced.item == "x"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from("abc"), st.floats(0, 10)),
            st.tuples(st.just("run"), st.just(""), st.floats(0.1, 5)),
        ),
        max_size=60,
    )
)
def test_counts_hold_and_every_entry_leaves_exactly_once(
    steps: list[tuple[str, str, float]],
) -> None:
    q = queue(per_caller=4, total=8)
    inside: set[str] = set()
    for number, (kind, caller, amount) in enumerate(steps):
        if kind == "push":
            try:
                entry, displaced = q.push(caller, str(number), now=float(number), expected=amount)
            except QueueFull:
                continue
            inside.add(entry.item)
            if displaced is not None:
                inside.remove(displaced.item)
        elif (popped := q.pop()) is not None:
            inside.remove(popped.item)
            assert q.running(popped.caller) == 1
            q.end(popped.caller, amount)
        assert len(q) == len(inside) == sum(q.waiting(c) for c in "abc") <= 8
        assert all(q.waiting(c) <= 4 for c in "abc")
    while (popped := q.pop()) is not None:
        inside.remove(popped.item)
    assert not inside


@given(st.lists(st.floats(0.1, 3.0), min_size=30, max_size=30))
def test_two_busy_callers_get_the_same_time_within_one_piece_of_work(costs: list[float]) -> None:
    q = queue()
    for i in range(30):
        q.push("a", "", now=float(i))
        q.push("b", "", now=float(i))
    used = {"a": 0.0, "b": 0.0}
    for cost in costs:
        entry = q.pop()
        assert entry is not None
        q.end(entry.caller, cost)
        used[entry.caller] += cost
    assert abs(used["a"] - used["b"]) <= max(costs) + 1e-9


def submitted(pool: FairExecutor, caller: str, work: threading.Event) -> Future[bool]:
    token = current_caller.set(caller)
    try:
        return pool.submit(work.wait, 30.0)
    finally:
        current_caller.reset(token)


def test_an_executor_keeps_threads_for_callers_that_have_none() -> None:
    pool = FairExecutor(4, "test", per_caller=2, waiting_per_caller=3)
    blocked, free = threading.Event(), threading.Event()
    free.set()
    held = [submitted(pool, "a", blocked) for _ in range(5)]
    assert submitted(pool, "b", free).result(10)
    with pytest.raises(Overloaded):
        submitted(pool, "a", blocked)
    held[-1].cancel()
    more = submitted(pool, "a", blocked)
    blocked.set()
    assert all(f.result(10) for f in (*held[:-1], more))
    pool.shutdown()


def test_an_executor_passes_on_results_and_errors() -> None:
    pool = FairExecutor(1, "test")
    assert pool.submit(sum, [1, 2]).result(10) == 3
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(10)
    assert pool.submit(len, "abc").result(10) == 3
    pool.shutdown(cancel_futures=True)
    with pytest.raises(RuntimeError):
        pool.submit(len, "abc").result(10)
