"""Callers share rows: no caller's number of requests, their length or priority keeps another waiting."""

from __future__ import annotations

import pytest
from engine.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.encoding.queue import Queue, QueuedText


def _until_first(world: World, id: int, limit: float) -> float:
    begin = world.now
    while id not in world.first:
        world.turn()
        assert world.now - begin < limit, f"{id} has waited {world.now - begin:.1f} s"
    return world.now - begin


@pytest.mark.parametrize("priority", [0, 1000])
def test_a_callers_flood_does_not_keep_a_neighbour_waiting(priority: int) -> None:
    world = World(rows=4)
    for id in range(100, 300):
        world.submit(id, 5, 1000, caller="many", priority=priority)
    for _ in range(100):
        world.turn()
    world.submit(1, 5, 40, caller="one")
    # It waits a second before a row of the other caller is pre-empted for it.
    assert _until_first(world, 1, 30.0) < 4.0
    world.submit(2, 5, 40, caller="one")
    assert _until_first(world, 2, 30.0) < 8.0


def test_a_high_priority_does_not_pre_empt_another_callers_rows() -> None:
    world = World(rows=4)
    world.submit(1, 5, 400, caller="one")
    world.submit(2, 5, 400, caller="one")
    while {1, 2} - set(world.first):
        world.turn()
    for id in range(100, 140):
        world.submit(id, 5, 50, caller="many", priority=1000)
    for _ in range(300):
        world.turn()
        assert {1, 2} <= {row.request.id for row in world.batch}


def test_a_long_prompt_that_others_gave_way_to_does_not_keep_a_third_caller_waiting() -> None:
    world = World(rows=4)
    world.submit(100, 5, 2000, width=20, caller="wide")
    while len(world.batch) < 4:
        world.turn()
    world.submit(200, 7000, 40, caller="long")
    while len(world.batch) == 4:
        world.turn()
    for id in range(1, 6):
        world.submit(id, 5, 5, caller="short")
        assert _until_first(world, id, 60.0) < 4.0
    assert 200 not in world.first


def test_within_a_caller_priority_pre_empts_as_before() -> None:
    world = World(rows=2)
    for id in (1, 2):
        world.submit(id, 5, 500, caller="one")
    for _ in range(50):
        world.turn()
    world.submit(3, 5, 5, caller="one", priority=5)
    assert _until_first(world, 3, 20.0) < 5.0


def test_rows_are_divided_equally_where_callers_contend() -> None:
    world = World(rows=6)
    for id in range(60):
        world.submit(id, 5, 100, caller="abc"[min(2, id // 20)])
    shares = []
    for _ in range(200):
        world.turn()
        held = [row.request.caller for row in world.batch]
        if len(held) == 6:
            shares.append([held.count(c) for c in "abc"])
    assert shares and shares[-1] == [2, 2, 2]
    world.run(20_000)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.integers(1, 60), st.integers(1, 30), st.integers(-9, 9)
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_everybody_comes_to_an_end(requests: list[tuple[str, int, int, int]], rows: int) -> None:
    world = World(rows=rows, limit=400)
    for id, (caller, size, output, priority) in enumerate(requests):
        world.submit(id, size, output, caller=caller, priority=priority)
        world.turn()
    world.run(20_000)
    assert {id for id, _ in world.finished} == set(range(len(requests)))


def test_texts_of_callers_are_encoded_in_equal_shares() -> None:
    queue = Queue()
    for request in range(50):
        queue.add(request, [QueuedText(50, n) for n in range(20)], priority=9, caller="many")
    for _ in range(10):
        queue.next(200)
    queue.add(99, [QueuedText(50, n) for n in range(20)], caller="one")
    batches = [queue.next(200) for _ in range(12)]
    mine = sum(p.request == 99 for batch in batches for p in batch)
    assert mine == 20
