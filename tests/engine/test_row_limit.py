"""Streams that have settled among few rows, and the many that come: in simulated time."""

from __future__ import annotations

import random

import pytest
from engine.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.books import Seat
from millrace.engine.latency_model import LatencyModel
from millrace.engine.row_limit import FEW, LEAST_ROWS, PATIENCE, SETTLED, RowLimit
from millrace.protocol import Choice, Sampling, Submit

TWO_CORES = {"step": 0.014, "row": 0.0033, "token": 0.0006, "base": 0.004, "join": 0.001}
A_GPU = {"step": 0.014, "row": 0.0002, "token": 3e-5, "base": 0.012, "join": 0.016}
KINDS = [(TWO_CORES, False, False), (A_GPU, True, True)]
LONG = 100_000


def settled(
    costs: dict[str, float], pipelined: bool, recurring: bool, *, streams: int = 4, rows: int = 32
) -> World:
    """A world in which so many streams have run by themselves for a while."""
    world = World(rows=rows, pipelined=pipelined, recurring=recurring, **costs)
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
    assert most >= (32 if recurring else 11), "those that can be had are taken"


def test_without_settled_streams_all_rows_are_used() -> None:
    world = World(rows=32, **TWO_CORES)
    for id in range(64):
        world.submit(id, 40, 200)
    most = 0
    while len(world.finished) < 64:
        world.turn()
        most = max(most, len(world.batch))
    assert most == 32


def test_whoever_waits_long_gets_a_row_beside_the_endless() -> None:
    world = settled(TWO_CORES, False, False)
    for id in range(4, 24):
        world.submit(id, 20, LONG)
    begun = world.now
    while len(world.first) < 24 and world.now < begun + 20 * PATIENCE:
        world.turn()
    assert len(world.first) == 24
    assert world.now - begun > 2 * PATIENCE, "the rows were as few as is smooth at first"


def test_the_more_important_is_not_held_up() -> None:
    world = settled(TWO_CORES, False, False)
    for id in range(4, 60):
        world.submit(id, 20, LONG)
    begun = world.now
    while world.now < begun + 3:
        world.turn()
    assert len(world.batch) < 20
    world.submit(99, 20, 20, priority=1)
    begun = world.now
    while 99 not in world.first:
        world.turn()
    assert world.now - begun < 0.5
    assert len(world.batch) < 20, "nobody had to leave for it, and nobody came with it"


def test_one_row_gives_way_where_rows_are_more_than_smooth() -> None:
    """What is as important as the settled goes before what is less, which leaves one for one."""
    world = World(rows=32, **TWO_CORES)
    for id in range(20):
        world.submit(id, 20, 30 * SETTLED, priority=-1)
    for id in range(20, 24):
        world.submit(id, 20, LONG)
    while len(world.first) < 24:
        world.turn()
    for id in range(20, 24):
        seat = next(s for s in world.decider._running if s.request.id == id)
        seat.company = 4
    world.submit(99, 20, 200)
    while 99 not in world.first:
        world.turn()
    assert len(world.batch) >= 24


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
    limit.look([seat], [], waited)
    assert min(most, max(LEAST_ROWS, 2 * max(FEW, company))) <= limit.rows <= most
    assert latency.limit(4, 8) >= 1 and latency.joins(4) >= 1
    limit.look([], [], waited)
    assert limit.rows == most
    assert latency.promised == float("inf")


def test_company_is_the_least_that_lasted() -> None:
    limit = RowLimit(32, LatencyModel(512))
    request = Submit(1, [1], [Choice(0, 0)], 900, Sampling())
    mine = Seat(1, request, 0, [1] * SETTLED, 0.0)
    others = [Seat(k, request, 0, [], 0.0) for k in range(2, 10)]
    for _ in range(SETTLED):
        limit.stepped([mine, *others])
    assert mine.company == 9 and not others[0].company
    for _ in range(SETTLED - 1):
        limit.stepped([mine])
    assert mine.company == 9, "others come and go"
    limit.stepped([mine])
    assert mine.company == 1
    for _ in range(3 * SETTLED):
        limit.stepped([mine, *others])
    assert mine.company == 1, "it stays used to what it had"
