"""The decider alone, in simulated time: nobody starves, memory holds, priority counts, faults are found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.sequences import PRIORITY_SECONDS
from millrace.engine.turn import Begin, decoder, encoder
from millrace.protocol import Abort, AbortChoice, Choice, Sampling, Submit

asked = st.tuples(
    st.integers(0, 1200),  # prompt
    st.integers(1, 30),  # output
    st.integers(1, 3),  # width
    st.integers(-2, 2),  # priority
)
kinds = st.sampled_from(
    [{}, {"pipelined": True}, {"flat": False}, {"speculate": 4}, {"page": 32, "per_token": 3}]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(asked, max_size=12), st.integers(1, 6), st.integers(3000, 30_000), kinds)
def test_everyone_finishes_once_and_the_memory_holds(
    tasks: list[tuple[int, int, int, int]], rows: int, limit: int, kind: dict[str, Any]
) -> None:
    world = World(rows=rows, limit=limit * kind.get("per_token", 1), **kind)
    for id, (size, output, width, priority) in enumerate(tasks):
        world.submit(id, size, output, width=width, priority=priority)
    world.run()
    wanted = [(i, k) for i, task in enumerate(tasks) for k in range(task[2])]
    assert sorted(world.finished) == wanted
    assert not world.failed


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(asked, st.integers(0, 6), st.booleans()), max_size=12),
    st.integers(1, 5),
    st.integers(3000, 20_000),
    kinds,
)
def test_aborts_at_any_time_leave_nothing_behind(
    tasks: list[tuple[tuple[int, int, int, int], int, bool]],
    rows: int,
    limit: int,
    kind: dict[str, Any],
) -> None:
    world = World(rows=rows, limit=limit * kind.get("per_token", 1), **kind)
    for id, ((size, output, width, priority), pause, one) in enumerate(tasks):
        world.submit(id, size, output, width=width, priority=priority)
        for _ in range(pause):
            world.turn()
        if id % 2:
            world.put(AbortChoice(id, 0) if one else Abort(id))
    world.run()
    done = {id for id, _ in world.finished}
    assert {i for i in range(len(tasks)) if i % 2 == 0} <= done


@settings(max_examples=40, deadline=None)
@given(st.integers(1000, 4000), st.integers(1, 50), st.integers(0, 3))
def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones(
    size: int, short: int, priority: int
) -> None:
    world = World(rows=3)
    world.submit(0, size)
    bound = size * world.token + priority * PRIORITY_SECONDS
    id = 0
    while 0 not in world.first:
        if world.decider._scheduler.waiting < 8:
            id += 1
            world.submit(id, short, priority=priority)
        world.turn()
        assert world.now < 12 * (bound + 20), "the long prompt starves"


@pytest.mark.parametrize("width", [4, 7])
def test_a_wide_request_is_not_starved_by_single_ones(width: int) -> None:
    world = World(rows=4)
    for id in range(1, 9):
        world.submit(id, 30, 20)
    for _ in range(10):
        world.turn()
    world.submit(0, 30, 20, width=width)
    id = 10
    while sum(1 for done, _ in world.finished if done == 0) < width:
        if world.decider._scheduler.waiting < 8:
            id += 1
            world.submit(id, 30, 20)
        world.turn()
        assert world.now < 120, "the wide request starves"
    assert id < 80, "others passed it"


def test_a_long_prompt_gets_its_memory_while_short_ones_keep_coming() -> None:
    world = World(rows=8, limit=16_000)
    for id in range(1, 9):
        world.submit(id, 200, 30)
    for _ in range(10):
        world.turn()
    world.submit(0, 5000, 5)
    id = 10
    while 0 not in world.first:
        if world.decider._scheduler.waiting < 8:
            id += 1
            world.submit(id, 200, 30)
        world.turn()
        assert world.now < 100, "the long prompt starves"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.lists(st.integers(-5, 5), min_size=2, max_size=8, unique=True))
def test_among_equals_the_higher_priority_goes_first(size: int, priorities: list[int]) -> None:
    world = World(rows=1)
    for id, priority in enumerate(priorities):
        world.submit(id, size, priority=priority)
    world.run()
    assert [priorities[id] for id in world.first] == sorted(priorities, reverse=True)


def test_a_short_prompt_passes_a_long_one_that_has_begun() -> None:
    world = World()
    world.submit(0, 4000)
    while world.now < 1.0:
        world.turn()
    world.submit(1, 20)
    world.run()
    assert world.first == [1, 0]


@pytest.mark.parametrize("late", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("gpu", [False, True])
def test_it_passes_beside_rows_that_run_however_little_is_left_of_the_long_one(
    gpu: bool, late: float
) -> None:
    """Beside others a prompt takes far longer than by itself: by that it is judged."""

    def begun() -> World:
        world = World(rows=6, token=0.0005, max_stall=0.15, pipelined=gpu)
        for id in range(3):
            world.submit(id, 20, 2000)
        while world.now < 5.0:
            world.turn()
        world.submit(3, 8000)
        return world

    world = begun()
    start = world.now
    while 3 not in world.first:
        world.turn()
    lasted = world.now - start
    assert lasted > 1.2 * 8000 * 0.0005
    world = begun()
    while world.now < start + late * lasted:
        world.turn()
    world.submit(4, 20)
    while 4 not in world.first:
        world.turn()
    assert 3 not in world.first


def test_what_is_more_important_takes_the_memory_of_what_is_less() -> None:
    world = World(rows=4, limit=8192)
    world.submit(0, 3000, 400, priority=-1)
    while 0 not in world.first:
        world.turn()
    world.submit(1, 3000, 5, priority=1)
    while 1 not in world.first:
        world.turn()
        assert world.now < 60, "a priority is turned round"
    world.run()
    assert sorted(world.finished) == [(0, 0), (1, 0)]


def test_what_gave_way_does_not_come_back_before_what_it_gave_way_to() -> None:
    """By rank the one comes first, and with its cost the other: they must not take turns for ever."""
    world = World(rows=1, limit=3000, pipelined=True)
    asked = [(428, 6, 3, -1), (981, 27, 3, 0), (29, 13, 3, -2), (0, 10, 3, -2), (428, 6, 3, -1)]
    for id, (size, output, width, priority) in enumerate([*asked, (0, 1, 1, 0)]):
        world.submit(id, size, output, width=width, priority=priority)
    world.run()


def test_a_row_that_has_all_the_memory_ends_where_it_ends() -> None:
    for pipelined in (False, True):
        world = World(limit=1024, pipelined=pipelined)
        world.submit(0, 500, 5000)
        world.run()
        assert world.finished == [(0, 0)]
        assert not world.failed


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.data(), st.booleans())
def test_a_fault_is_traced_to_the_rows_that_cause_it(
    count: int, data: st.DataObject, pipelined: bool
) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    world = World(rows=count, pipelined=pipelined, poison=lambda request: request.id in guilty)
    for id in range(count):
        world.submit(id, 20 + 10 * id, 30)
    world.run()
    assert set(world.failed) == guilty
    assert sorted(world.finished) == [(i, 0) for i in range(count) if i not in guilty]


@pytest.mark.parametrize("pipelined", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_prompt_that_fails_is_the_only_one_to_fail(pipelined: bool, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, 7), max_size=3))
    rows = data.draw(st.sets(st.integers(0, 7), max_size=1))
    world = World(
        rows=6,
        pipelined=pipelined,
        poison=lambda request: request.id in rows,
        poisoned_prompt=lambda request: request.id in guilty,
    )
    for id in range(8):
        world.submit(id, 60 + id, 10)
        for _ in range(data.draw(st.integers(0, 2))):
            world.turn()
    world.run()
    assert set(world.failed) == guilty | rows
    assert sorted(world.finished) == [(i, 0) for i in range(8) if i not in guilty | rows]


def test_a_batch_of_short_answers_is_full() -> None:
    world = World(
        rows=64, pipelined=True, chunk=2048, token=2e-5, base=0.012, sequence=2e-5, max_stall=0.1
    )
    dice, asked, rows = random.Random(3), 0, []
    while len(world.finished) < 400:
        while asked < 400 and asked - len(world.finished) < 64:
            world.submit(asked, 40, dice.randint(2, 8))
            asked += 1
        world.turn()
        if asked < 400 and world.batch:
            rows.append(len(world.batch))
    assert sum(rows[len(rows) // 4 :]) / len(rows[len(rows) // 4 :]) > 40


@pytest.mark.parametrize("kind", ["plain", "pipelined", "drafts", "apart"])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_in_a_random_walk(seed: int, kind: str) -> None:
    """Requests of all kinds come, are given up, and fail, in memory that is too small for them."""
    dice = random.Random(f"{kind}{seed}")
    how: dict[str, Any] = {
        "plain": {},
        "pipelined": {"pipelined": True},
        "drafts": {"speculate": 3},
        "apart": {"flat": False, "pipelined": True},
    }[kind]
    bad, worse = set(range(5, 120, 41)), set(range(7, 120, 43))
    world = World(
        rows=dice.randint(2, 12),
        limit=dice.randint(2500, 9000),
        page=dice.choice([1, 16, 64]),
        chunk=dice.choice([48, 256, 2048]),
        max_stall=dice.choice([0.15, 0.5]),
        sequence=dice.choice([0.0, 0.003]),
        token=dice.choice([0.005, 2e-4]),
        poison=lambda request: request.id in bad,
        poisoned_prompt=lambda request: request.id in worse,
        **how,
    )
    gone: set[int] = set()
    for id in range(120):
        world.submit(
            id,
            int(2 * 700 ** dice.random()),
            dice.randint(1, 60),
            width=dice.choice([1, 1, 1, 2, 6]),
            priority=dice.choice([0, 0, 0, 1, -1]),
            caller=dice.choice("abc"),
        )
        if dice.random() < 0.05:
            gone.add(victim := dice.randint(max(0, id - 20), id))
            world.put(Abort(victim))
        if dice.random() < 0.8:
            for _ in range(dice.randrange(12)):
                world.turn()
    world.run(60_000)
    ended = {id for id, _ in world.finished}
    assert ended | gone | set(world.failed) == set(range(120))
    assert set(world.failed) <= bad | worse
    assert bad | worse <= set(world.failed) | gone


def test_turns_are_plain_data() -> None:
    world = World(rows=3, limit=4000)
    for id in range(6):
        world.submit(id, 150 * id, 9, width=1 + id % 2)
    while world._inbox or world.decider.busy:
        turn = world.turn()
        assert decoder.decode(encoder.encode(turn)) == turn


def test_a_wide_request_leaves_rows_to_those_that_come_after_it() -> None:
    world = World(rows=4)
    world.submit(0, 30, 40, width=64)
    while 0 not in world.first:
        world.turn()
    world.submit(1, 2, 2)
    while 1 not in world.first:
        world.turn()
    assert sum(1 for id, _ in world.finished if id == 0) < 16


def test_the_rows_of_a_wide_request_do_not_wait_for_the_whole_queue_each_time() -> None:
    """Beside a queue that never ends, eight rows of one request take about what eight requests take."""
    ended: dict[bool, float] = {}
    for wide in (True, False):
        world = World(rows=4)
        for id in range(100, 116):
            world.submit(id, 5, 10)
        for _ in range(20):
            world.turn()
        mine = {(0, k) for k in range(8)} if wide else {(k, 0) for k in range(8)}
        begun = world.now
        if wide:
            world.submit(0, 5, 10, width=8)
        else:
            for id in range(8):
                world.submit(id, 5, 10)
        following, seen = 116, len(world.finished)
        while not mine <= set(world.finished):
            world.turn()
            for _ in range(len(world.finished) - seen):
                world.submit(following, 5, 10)
                following += 1
            seen = len(world.finished)
        ended[wide] = world.now - begun
    assert ended[True] <= 2.5 * ended[False]


def test_what_was_under_way_goes_on_before_what_was_not() -> None:
    world = World(rows=4)
    for id in range(8):
        world.submit(id, 3, 5)
    for id in range(8, 12):
        prompt = [(id * 7919 + k) % 30_000 for k in range(300)]
        choices = [Choice(0, 0, generated=[1, 1])]
        world.put(Submit(id, prompt, choices, 50, Sampling()))
    while len(world.batch) < 4:
        world.turn()
    assert {row.request.id for row in world.batch} == {8, 9, 10, 11}
    world.run()


def test_a_row_that_grew_to_the_edge_of_the_memory_can_be_resumed() -> None:
    world = World(limit=1000)
    prompt = list(range(600))
    world.put(Submit(0, prompt, [Choice(0, 0, [1] * 350)], 380, Sampling()))
    world.run()
    assert world.finished == [(0, 0)] and not world.failed


@pytest.mark.parametrize("pipelined", [False, True])
def test_mixed_lengths_cost_no_more_than_equal_ones(pipelined: bool) -> None:
    dice = random.Random(42)
    lengths = [dice.randrange(200, 800) for _ in range(32)]
    mean = sum(lengths) // len(lengths)
    seconds = []
    for sizes in ([mean] * len(lengths), lengths):
        world = World(rows=32, chunk=2048, pipelined=pipelined)
        for id, size in enumerate(sizes):
            world.submit(id, size, 128)
        world.run()
        assert len(world.finished) == len(lengths)
        seconds.append(world.now)
    equal, mixed = seconds
    assert mixed <= 1.1 * equal


def test_who_gives_way_goes_after_longer_ones_and_waits_for_nobody() -> None:
    world = World(rows=8)
    for id in range(20, 28):
        world.submit(id, 40, 30)
    world.run()
    for id, (size, behind) in enumerate([(20, 10.0), (900, 0.0), (600, 0.0), (400, 5.0)]):
        prompt = [(id * 7919 + k) % 30_000 for k in range(size)]
        world.put(Submit(id, prompt, [Choice(0, 0)], 30, Sampling(), behind=behind))
    begun = []
    while len(begun) < 4:
        turn = world.turn()
        begun += [o.prefill for o in turn.operations if isinstance(o, Begin)]
        if len(begun) == 1:
            prefills = {j.number: j.request.id for j in world.decider._scheduler.prefills()}
    assert [prefills[number] for number in begun] == [2, 1, 3, 0]
    world.run()
    world.put(Submit(9, [3] * 20, [Choice(0, 0)], 5, Sampling(), behind=60.0))
    begin = world.now
    world.run()
    assert world.now - begin < 2
