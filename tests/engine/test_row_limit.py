"""Streams that have settled among few rows, and the many that come: in simulated time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.books import Seat
from millrace.engine.latency_model import LatencyModel
from millrace.engine.row_limit import FEW, LEAST_ROWS, LONG_PATIENCE, PATIENCE, SETTLED, RowLimit
from millrace.engine.scheduler import LEAVING
from millrace.engine.turn import Drop, Join, Reserve
from millrace.protocol import Choice, Sampling, Submit

TWO_CORES = {"step": 0.014, "row": 0.0033, "token": 0.0006, "base": 0.004, "join": 0.001}
A_GPU = {"step": 0.014, "row": 0.0002, "token": 3e-5, "base": 0.012, "join": 0.016}
KINDS = [(TWO_CORES, False, False), (A_GPU, True, True)]
LONG = 100_000


def settled(
    costs: dict[str, float],
    pipelined: bool,
    recurring: bool,
    *,
    streams: int = 4,
    rows: int = 32,
    **more: Any,
) -> World:
    """A world in which so many streams have run by themselves for a while."""
    world = World(rows=rows, pipelined=pipelined, recurring=recurring, **costs, **more)
    for id in range(streams):
        world.submit(id, 60, LONG)
    while not world.batch or min(len(r.tokens) for r in world.batch) < SETTLED + 8:
        world.turn()
    return world


@pytest.mark.parametrize("costs, pipelined, recurring", KINDS)
@pytest.mark.parametrize("sizes", [(3, 4), (20, 200), (10, 900)])
def test_two_hundred_who_come_are_hardly_felt(
    costs: dict[str, float], pipelined: bool, recurring: bool, sizes: tuple[int, int]
) -> None:
    world = settled(costs, pipelined, recurring)
    alone = sorted(world.gaps[-40:])[-1]
    world.gaps.clear()
    dice = random.Random(1)
    for id in range(4, 204):
        world.submit(id, dice.randint(*sizes), 300)
    ends = world.now + 25
    most = 0
    while world.now < ends:
        world.turn()
        most = max(most, len(world.batch))
    # Beside a device that lags behind, what a chunk takes that is not one of many is a guess.
    assert max(world.gaps) <= (3.3 if pipelined else 3) * alone
    assert most >= (32 if recurring else 9), "those that can be had are taken"


def test_without_settled_streams_all_rows_are_used() -> None:
    world = World(rows=32, **TWO_CORES)
    for id in range(64):
        world.submit(id, 40, 200)
    most = 0
    while len(world.finished) < 64:
        world.turn()
        most = max(most, len(world.batch))
    assert most == 32


def begin(world: World, id: int, *, within: float, priority: int = 0) -> float:
    """Ask for a short answer; says how long it took to begin, or fails when it takes too long."""
    world.submit(id, 20, 20, priority=priority)
    begun = world.now
    while id not in world.first:
        world.turn()
        assert world.now - begun < within, f"{len(world.batch)} rows run"
    return world.now - begun


def run(world: World, seconds: float) -> None:
    ends = world.now + seconds
    while world.now < ends:
        world.turn()


def test_whoever_waits_long_gets_a_row_beside_the_endless() -> None:
    world = settled(TWO_CORES, False, False)
    for id in range(4, 24):
        world.submit(id, 20, LONG)
    begun = world.now
    while len(world.first) < 24 and world.now < begun + 15 * (PATIENCE + LONG_PATIENCE):
        world.turn()
    assert len(world.first) == 24
    assert world.now - begun > 2 * PATIENCE, "the rows were as few as is smooth at first"
    begin(world, 99, within=LONG_PATIENCE + 1)


def test_who_would_be_felt_waits_longer() -> None:
    """Processors compute some rows at once: with one more, a step takes as long as with as many again."""
    costs = {"step": 0.026, "row": 0.0003, "token": 0.0006, "base": 0.025, "join": 0.001}
    world = settled(costs, False, False, tile=8)
    alone = max(world.gaps[-40:])
    world.gaps.clear()
    for id in range(4, 104):
        world.submit(id, 5, LONG)
    run(world, 24)
    assert len(world.batch) == 8 + 1, "of the next eight one was tried"
    assert sorted(world.gaps)[-5] <= 3 * alone
    run(world, 60)
    assert len(world.batch) > 9, "but nobody waits for ever"


def test_rows_beyond_the_limit_make_nobody_wait_longer() -> None:
    world = settled(TWO_CORES, False, False)
    for id in range(4, 24):
        world.submit(id, 20, LONG, priority=1)
    run(world, 10)
    assert len(world.batch) == 24
    begin(world, 99, within=PATIENCE + 1)


def test_the_more_important_is_not_held_up() -> None:
    world = settled(TWO_CORES, False, False)
    for id in range(4, 60):
        world.submit(id, 20, LONG)
    run(world, 3)
    assert len(world.batch) < 20
    begin(world, 99, within=0.5, priority=1)
    assert len(world.batch) < 20, "nobody had to leave for it, and nobody came with it"
    run(world, 40)
    assert len(world.batch) < 32
    begin(world, 100, within=0.5, priority=1)  # though some have waited longer than that is worth


def test_nobody_waits_for_the_sake_of_what_is_less_important() -> None:
    world = World(rows=32, **TWO_CORES)
    world.submit(0, 60, LONG, priority=-1)
    run(world, 5)
    for id in range(1, 21):
        world.submit(id, 20, LONG)
    run(world, 15)
    assert len(world.batch) == 21
    for id in range(30, 38):
        begin(world, id, within=2)
    assert 0 in {r.request.id for r in world.batch}, "nor does that leave while rows are free"


def test_streams_that_come_back_together_are_used_to_each_other() -> None:
    """As after an engine's end: they have all their tokens behind them."""
    world = World(rows=32, **TWO_CORES)
    for id in range(24):
        prompt = [(id * 7919 + k) % 30_000 for k in range(20)]
        world.put(Submit(id, prompt, [Choice(0, 0, [1] * 200)], LONG, Sampling()))
    while len(world.batch) < 24:
        world.turn()
    run(world, 20)
    assert {s.company for s in world.decider._running} == {24}
    begin(world, 99, within=2)


@settings(max_examples=50, deadline=None)
@given(
    steps=st.dictionaries(st.integers(1, 64), st.floats(1e-4, 2), min_size=1),
    company=st.integers(1, 70),
    most=st.integers(1, 64),
    waited=st.floats(0, 1000),
)
def test_there_are_always_some(
    steps: dict[int, float], company: int, most: int, waited: float
) -> None:
    latency = LatencyModel(512)
    for rows, seconds in steps.items():
        latency.saw_step(rows, seconds)
    limit = RowLimit(most, latency)
    seat = Seat(1, Submit(1, [1], [Choice(0, 0)], 9, Sampling()), 0, [], 0.0)
    seat.company = company
    limit.look([seat], 1, [], waited)
    assert min(most, max(LEAST_ROWS, 2 * max(FEW, company))) <= limit.rows <= most
    assert latency.limit(4, 8) >= 1 and latency.joins(4) >= 1
    limit.look([], 0, [], waited)
    assert limit.rows == most
    assert latency.promised == float("inf")


def test_company_is_the_least_that_lasted() -> None:
    limit = RowLimit(32, LatencyModel(512))
    request = Submit(1, [1], [Choice(0, 0)], 900, Sampling())
    mine = Seat(1, request, 0, [], 0.0)
    others = [Seat(k, request, 0, [], 0.0) for k in range(2, 10)]
    for _ in range(SETTLED - 1):
        limit.stepped([mine, *others])
    assert not mine.company
    limit.stepped([mine, *others])
    assert mine.company == 9
    for _ in range(SETTLED - 1):
        limit.stepped([mine])
    assert mine.company == 9, "others come and go"
    limit.stepped([mine])
    assert mine.company == 1
    for _ in range(3 * SETTLED):
        limit.stepped([mine, *others])
    assert mine.company == 1, "it stays used to what it had"


def test_a_gap_on_a_gpu_has_one_thing_in_it() -> None:
    """Rows that leave, memory for more, rows that join: each takes launches for every layer."""
    world = settled(A_GPU, True, True)
    dice = random.Random(2)
    for id in range(4, 104):
        world.submit(id, dice.randint(3, 30), dice.randint(5, 60))
    slots, left = 4, 0
    while len(world.finished) < 100:
        turn = world.turn()
        kinds = {type(operation) for operation in turn.operations}
        reserved = [o.slots for o in turn.operations if isinstance(o, Reserve)]
        if Join in kinds:
            assert Drop not in kinds or left >= LEAVING, "one after the other, but not for ever"
            assert all(more <= slots for more in reserved), "memory has come before"
        slots, left = reserved[-1] if reserved else slots, left + 1 if Drop in kinds else 0
        assert world.now < 60
