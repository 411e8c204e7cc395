"""The policy alone, in simulated time: nobody starves, the budget holds, priority counts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.latency_model import GAP_IN_STEPS, SMALLEST_CHUNK, LatencyModel
from millrace.engine.memory import Budget, StateCost
from millrace.engine.scheduler import PADDING, PRIORITY_SECONDS, Scheduler


@dataclass(eq=False)
class Prompt:
    arrived: float
    size: int
    priority: int = 0
    width: int = 1
    output: int = 5
    done: int = 0
    name: int = field(default_factory=itertools.count().__next__)

    @property
    def left(self) -> int:
        return self.size - self.done

    @property
    def reach(self) -> int:
        """Every prompt pauses after each 100 tokens."""
        return min(self.left, 100 - self.done % 100)

    @property
    def blocked(self) -> bool:
        return False

    def resembles(self, other: Prompt) -> bool:
        return self.size == other.size

    @property
    def length(self) -> int:
        return self.size + 1

    @property
    def fresh(self) -> bool:
        return not self.done

    def narrow(self) -> Prompt:
        rest = Prompt(self.arrived, self.size, self.priority, self.width - 1, self.output)
        rest.name = self.name
        self.width = 1
        return rest


@dataclass(eq=False)
class Stream:
    prompt: Prompt
    length: int
    left: int

    @property
    def arrived(self) -> float:
        return self.prompt.arrived

    @property
    def priority(self) -> int:
        return self.prompt.priority


class World:
    """A device on which a decode step takes 0.1 s and a prompt token 5 ms."""

    STEP, TOKEN = 0.1, 0.005

    def __init__(self, *, rows: int = 4, limit: int = 1 << 60, chunk: int = 512) -> None:
        self.now = 0.0
        self.latency = LatencyModel(chunk)
        for count in range(1, 40):
            self.latency.saw_step(count, self.STEP)
        for count in (10, 30):
            self.latency.saw_gap(1, count, self.STEP + count * self.TOKEN)
        self.budget = Budget(StateCost(per_token=1), limit)
        self.scheduler: Scheduler[Prompt] = Scheduler(rows, self.latency, self.budget)
        self.rows: list[Stream] = []
        self.first: list[Prompt] = []
        self.finished: list[Prompt] = []
        self.max_rows = rows

    def turn(self) -> None:
        lengths = [r.length for r in self.rows]
        for v in sorted(self.scheduler.victims(self.rows, lengths), reverse=True):
            row = self.rows.pop(v)
            again = Prompt(row.arrived, row.length, row.priority, output=row.left)
            again.name = row.prompt.name
            self.scheduler.add(again)
        for task in self.scheduler.joining([r.length for r in self.rows], self.now):
            self.rows += [Stream(task, task.length, task.output) for _ in range(task.width)]
            self.first.append(task)
        if self.rows:
            if len(self.rows) > 1:
                assert self.budget.batch([r.length + 1 for r in self.rows]) <= self.budget.limit
            self.now += self.STEP
            self.latency.saw_step(len(self.rows), self.STEP)
            for row in self.rows:
                row.length += 1
                row.left -= 1
            self.finished += [r.prompt for r in self.rows if not r.left]
            self.rows = [r for r in self.rows if r.left]
        planned = self.scheduler.next_chunk([r.length for r in self.rows])
        if planned:
            group, count = planned
            assert 0 < count <= min(t.left for t in group) + PADDING
            assert count <= max(t.left for t in group)
            assert len(group) == 1 or all(t.done == 0 for t in group)
            for task in group:
                task.done += min(count, task.left)
            spent = count * len(group) * self.TOKEN
            if self.rows and count * len(group) > SMALLEST_CHUNK:
                assert spent + self.STEP <= GAP_IN_STEPS * self.STEP + 1e-9
            self.now += spent
        elif not self.rows:
            self.now += 0.01

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.rows and not self.scheduler.busy:
                return
            self.turn()
        raise AssertionError("somebody starves")


prompts = st.builds(
    Prompt,
    arrived=st.just(0.0),
    size=st.integers(0, 3000),
    priority=st.integers(-2, 2),
    width=st.integers(1, 3),
    output=st.integers(1, 40),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts, max_size=12), st.integers(1, 6), st.integers(3000, 60_000))
def test_everyone_finishes_once_and_the_budget_holds(
    tasks: list[Prompt], rows: int, limit: int
) -> None:
    world = World(rows=rows, limit=limit)
    asked = [(p.name, p.width) for p in tasks]
    for task in tasks:
        world.scheduler.add(task)
    world.run()
    assert sorted(p.name for p in world.finished) == sorted(
        name for name, width in asked for _ in range(width)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1000, 4000), st.integers(1, 50), st.integers(0, 3))
def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones(
    size: int, short: int, priority: int
) -> None:
    world = World(rows=3)
    long = Prompt(0.0, size)
    world.scheduler.add(long)
    bound = size * World.TOKEN + priority * PRIORITY_SECONDS
    while long not in world.first:
        if world.scheduler.waiting < 8:
            world.scheduler.add(Prompt(world.now, short, priority))
        world.turn()
        assert world.now < 12 * (bound + 20), "the long prompt starves"


@given(st.integers(1, 500), st.lists(st.integers(-5, 5), min_size=2, max_size=8, unique=True))
def test_among_equals_the_higher_priority_goes_first(size: int, priorities: list[int]) -> None:
    world = World(rows=1)
    for priority in priorities:
        world.scheduler.add(Prompt(0.0, size, priority))
    world.run()
    assert [p.priority for p in world.first] == sorted(priorities, reverse=True)


def test_a_short_prompt_passes_a_long_one_that_has_begun() -> None:
    world = World()
    long, short = Prompt(0.0, 4000), Prompt(1.0, 20)
    world.scheduler.add(long)
    while world.now < 1.0:
        world.turn()
    world.scheduler.add(short)
    world.run()
    assert world.first == [short, long]


def test_the_lowest_priority_gives_way_and_then_the_youngest() -> None:
    world = World(limit=3 * 512)
    rows = [
        Stream(Prompt(arrived, 0, priority), 300, 9)
        for arrived, priority in ((0.0, 0), (1.0, 1), (2.0, 0), (3.0, 1))
    ]
    assert world.scheduler.victims(rows, [300] * 4) == [2]
    assert world.scheduler.victims(rows, [800] * 4) == [2, 0, 3]
    assert world.scheduler.victims(rows[:1], [100_000]) == []


def test_chunks_follow_the_step_to_come_and_the_wish() -> None:
    latency = LatencyModel(512)
    assert latency.chunk(2000, 0) == 500
    for _ in range(10):
        latency.saw_step(4, 0.1)
        latency.saw_step(8, 0.15)
    assert 7 <= latency.limit(4) == latency.limit(4, coming=1) <= 8, (
        "a chunk may cost a step beside its tokens, and a token a part of one"
    )
    for tokens in (50, 100) * 15:
        latency.saw_gap(4, tokens, 0.1 + tokens / 1000)
    assert 149 <= latency.limit(4) <= 150
    assert latency.limit(4, coming=5) == 200, "what so large a chunk takes has not been seen"
    latency.saw_chunk(250, 0.25)
    assert 274 <= latency.limit(4, coming=5) <= 275
    assert latency.chunk(2000, 4, coming=5) == 250
    assert latency.chunk(7, 4) == 7
    wish = LatencyModel(512, max_stall=0.3)
    wish.saw_step(4, 0.1)
    for tokens in (50, 100):
        wish.saw_gap(4, tokens, 0.1 + tokens / 1000)
    assert 199 <= wish.limit(4, coming=4) <= 200


@given(
    base=st.floats(0, 3), token=st.floats(1 / 300, 1 / 4), step=st.floats(0.005, 0.3),
    drift=st.floats(0.99, 1.01),
)  # fmt: skip
def test_chunks_find_their_size_whatever_they_take(
    base: float, token: float, step: float, drift: float
) -> None:
    latency = LatencyModel(512)
    for _ in range(10):
        latency.saw_step(4, step)
    base, token = base * step, token * step
    gaps, sizes, fitting = [], [], []
    for _ in range(60):
        sizes.append(latency.limit(4))
        gaps.append(step + base + sizes[-1] * token)
        latency.saw_gap(4, sizes[-1], gaps[-1])
        fitting.append((1.5 * step - base) / token)
        base *= drift
    for gap, size in zip(gaps[30:], sizes[30:], strict=True):
        assert size == SMALLEST_CHUNK or gap <= 1.2 * GAP_IN_STEPS * step
    assert sizes[-1] >= min(512, 0.5 * min(fitting[30:])) - 2, (sizes, fitting)


def test_steps_that_were_not_measured_are_judged_from_those_that_were() -> None:
    latency = LatencyModel(512)
    assert latency.step(3) == 0.0
    latency.saw_step(1, 0.1)
    assert latency.step(1) < latency.step(6) == 0.2
    latency.saw_step(5, 0.3)
    assert abs(latency.step(3) - 0.2) < 1e-9
