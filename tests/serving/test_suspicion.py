"""Whom an engine's deaths are blamed on, in a simulated engine that dies as its requests tell it to."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from millrace.serving.suspicion import Cause, Milestone, Suspicion


@dataclass
class Job:
    """A request: so many chunks of prompt, so many tokens, and maybe a point that ends the engine."""

    chunks: int
    tokens: int
    arrives: int = 0
    dies_at_chunk: int | None = None
    dies_at_token: int | None = None
    done: int = 0
    ran: int = 0
    outcome: str = ""

    @property
    def poisoned(self) -> bool:
        return self.dies_at_chunk is not None or self.dies_at_token is not None

    @property
    def milestone(self) -> Milestone:
        return Milestone(self.done, self.ran)


class World:
    """An engine, and a front that starts it again.

    It alternates chunks and steps; a flat one runs all sequences in each step, prompts under suspicion
    after the others, one by one.
    """

    def __init__(
        self,
        jobs: list[Job],
        names: str = "exact",
        slots: int = 32,
        together: int = 1,
        flat: bool = False,
    ) -> None:
        self.suspicion = Suspicion()
        self.jobs = dict(enumerate(jobs))
        self.names = names
        self.slots = slots
        self.engine: list[int] = []
        self.crashes = 0
        self.ticks = 0
        self.together = together
        """Prompts of which a chunk is run at the same time."""
        self.flat = flat
        self.apart: set[int] = set()
        """Requests that the engine was given as suspects."""

    def run(self, kills: list[tuple[int, Cause]], limit: int = 20_000) -> None:
        gaps = iter(kills)
        gap, cause = next(gaps, (limit, Cause.KILL))
        since = 0
        while any(not j.outcome for j in self.jobs.values()):
            self.ticks += 1
            assert self.ticks < limit, "somebody waits for ever"
            since += 1
            self.hand_over()
            named = self.work()
            if named is not None:
                self.crashes += 1
                self.die(named, Cause.CRASH)
            elif since >= gap:
                self.die(self.named(self.next_work()[0]), cause)
                gap, cause = next(gaps, (limit, Cause.KILL))
                since = 0

    def hand_over(self) -> None:
        waiting = [r for r, j in self.jobs.items() if not j.outcome and j.arrives <= self.ticks]
        for request in self.suspicion.order(waiting):
            job = self.jobs[request]
            if request not in self.engine and self.suspicion.may_run(request):
                job.ran = 0
                self.engine.append(request)
                if self.suspicion.suspects(request):
                    self.apart.add(request)
                else:
                    self.apart.discard(request)

    def next_work(self) -> list[list[int]]:
        """What the next turn runs, in the parts that the recorder names one after the other."""
        running = self.engine[: self.slots]
        prefill = [r for r in running if self.jobs[r].ran < self.jobs[r].chunks]
        rows = [r for r in running if r not in prefill]
        if self.flat and running:
            prefill = prefill[: self.together]
            alone = [r for r in prefill if r in self.apart]
            both = rows + [r for r in prefill if r not in self.apart]
            return ([both] if both else []) + [[r] for r in alone]
        return [prefill[: self.together] if prefill and (self.ticks % 2 or not rows) else rows]

    def named(self, work: list[int]) -> list[int]:
        return [] if self.names == "none" else work

    def work(self) -> list[int] | None:
        """A turn; the requests that the recorder names if the engine dies of it."""
        done = []
        for part in self.next_work():
            for request in part:
                job = self.jobs[request]
                prefill = job.ran < job.chunks
                if job.dies_at_chunk == job.ran if prefill else job.dies_at_token == job.done:
                    return self.named(part)
            done += part
        for request in done:
            job = self.jobs[request]
            if job.ran < job.chunks:
                job.ran += 1
            else:
                job.done += 1
            self.suspicion.progressed(request, job.milestone)
            if job.done == job.tokens:
                self.end(request, "ok")
        return None

    def die(self, named: list[int], cause: Cause) -> None:
        in_flight = {r: self.jobs[r].milestone for r in self.engine}
        self.engine = []
        for request in self.suspicion.died(in_flight, named, cause):
            self.end(request, "error")

    def end(self, request: int, outcome: str) -> None:
        self.jobs[request].outcome = outcome
        self.suspicion.ended(request)
        if request in self.engine:
            self.engine.remove(request)


def jobs(poisoned: bool) -> st.SearchStrategy[Job]:
    place = st.none() | st.integers(0, 4)
    return st.builds(
        lambda chunks, tokens, arrives, chunk, token: Job(
            chunks,
            tokens,
            arrives,
            min(chunk, chunks - 1) if poisoned and chunk is not None else None,
            min(token or 0, tokens - 1) if poisoned and chunk is None else None,
        ),
        st.integers(1, 5),
        st.integers(1, 60),
        st.integers(0, 80),
        place,
        place,
    )


def mixed(healthy: int, poisoned: int) -> st.SearchStrategy[list[Job]]:
    return st.tuples(
        st.lists(jobs(False), max_size=healthy), st.lists(jobs(True), max_size=poisoned)
    ).flatmap(lambda both: st.permutations(both[0] + both[1]))


@given(mixed(12, 5), st.sampled_from(["exact", "none"]), st.integers(1, 6), st.booleans())
def test_the_poisoned_end_and_nobody_else(
    given_jobs: list[Job], names: str, together: int, flat: bool
) -> None:
    world = World(given_jobs, names, together=together, flat=flat)
    world.run([])
    for job in world.jobs.values():
        assert job.outcome == ("error" if job.poisoned else "ok"), job
    poisoned = sum(j.poisoned for j in given_jobs)
    assert world.crashes <= poisoned * (2 * math.log2(len(given_jobs) + 1) + 6)


@given(
    mixed(10, 0),
    st.lists(
        st.tuples(st.integers(24, 60), st.sampled_from([Cause.KILL, Cause.OUTSIDE])), max_size=100
    ),
    st.sampled_from(["exact", "none"]),
    st.integers(1, 6),
    st.booleans(),
)
def test_kills_from_outside_fail_nobody(
    given_jobs: list[Job], kills: list[tuple[int, Cause]], names: str, together: int, flat: bool
) -> None:
    world = World(given_jobs, names, together=together, flat=flat)
    world.run(kills)
    assert all(job.outcome == "ok" for job in given_jobs)


@given(
    mixed(8, 4),
    st.lists(
        st.tuples(st.integers(24, 60), st.sampled_from([Cause.KILL, Cause.OUTSIDE])), max_size=30
    ),
    st.booleans(),
)
def test_kills_beside_poisoned_requests(
    given_jobs: list[Job], kills: list[tuple[int, Cause]], flat: bool
) -> None:
    world = World(given_jobs, flat=flat)
    world.run(kills)
    for job in world.jobs.values():
        assert job.outcome == ("error" if job.poisoned else "ok"), job


@given(mixed(6, 3), st.integers(1, 3), st.booleans())
def test_few_slots_change_nothing(given_jobs: list[Job], slots: int, flat: bool) -> None:
    world = World(given_jobs, slots=slots, flat=flat)
    world.run([])
    for job in world.jobs.values():
        assert job.outcome == ("error" if job.poisoned else "ok"), job


def test_a_poisoned_prompt_is_found_in_two_deaths() -> None:
    healthy = [Job(2, 40) for _ in range(8)]
    world = World([*healthy, Job(3, 5, 20, dies_at_chunk=1)])
    world.run([])
    assert world.crashes == 2


def test_five_poisoned_prompts_beside_eight_streams() -> None:
    healthy = [Job(2, 60) for _ in range(8)]
    world = World([*healthy, *(Job(1, 5, 10, dies_at_chunk=0) for _ in range(5))])
    world.run([])
    assert world.crashes == 10
    assert [j.outcome for j in world.jobs.values()] == ["ok"] * 8 + ["error"] * 5


@given(
    st.lists(st.integers(5, 60), min_size=5, max_size=5),
    st.integers(1, 4),
    st.integers(1, 13),
    st.sampled_from(["exact", "none"]),
)
@example([30, 8, 59, 33, 9], 1, 13, "exact")  # newcomers are on probation, too
def test_poisoned_prompts_that_come_one_after_the_other(
    arrivals: list[int], chunks: int, together: int, names: str
) -> None:
    healthy = [Job(chunks, 400) for _ in range(8)]
    poisoned = [Job(4, 5, arrives, dies_at_chunk=1) for arrives in arrivals]
    world = World([*healthy, *poisoned], names, together=together, flat=True)
    world.run([])
    assert world.crashes <= (20 if names == "exact" else 25)
    assert [j.outcome for j in world.jobs.values()] == ["ok"] * 8 + ["error"] * 5


def test_everybody_goes_back_in_at_once_after_a_death() -> None:
    suspicion = Suspicion()
    milestone = Milestone(5, 1)
    assert suspicion.died(dict.fromkeys(range(8), milestone), range(8), Cause.CRASH) == {}
    assert all(suspicion.may_run(r) for r in range(9))


def test_halves_take_turns_while_others_run() -> None:
    suspicion = Suspicion()
    milestone = Milestone(5, 1)
    for _ in range(2):
        suspicion.died(dict.fromkeys(range(8), milestone), [], Cause.CRASH)
    assert [suspicion.may_run(r) for r in range(8)] == [True] * 4 + [False] * 4
    assert suspicion.may_run(8), "newcomers run"
    further = Milestone(6, 2)
    assert [suspicion.progressed(r, further) for r in range(4)] == [False, False, False, True]
    assert all(suspicion.may_run(r) for r in range(8))


def test_those_without_a_token_are_tried_before_those_that_had_some() -> None:
    suspicion = Suspicion()
    standing = {r: Milestone(0 if r in (2, 5, 7) else 9, 3) for r in range(8)}
    for _ in range(2):
        assert suspicion.died(standing, range(8), Cause.CRASH) == {}
    assert [r for r in range(8) if suspicion.may_run(r)] == [2, 5, 7]


def test_being_frozen_blames_nobody() -> None:
    suspicion = Suspicion()
    for _ in range(50):
        assert suspicion.died({1: Milestone(5, 1)}, [1], Cause.OUTSIDE) == {}
        assert suspicion.may_run(1)


def test_the_fourth_kill_in_the_same_place_ends_the_one_that_was_named() -> None:
    suspicion = Suspicion()
    in_flight = {1: Milestone(0, 3), 2: Milestone(8, 4)}
    ends = [suspicion.died(in_flight, [1], Cause.KILL) for _ in range(4)]
    assert ends == [{}, {}, {}, {1: 4}]


def test_kills_as_soon_as_it_is_up_meet_everybody_in_turn() -> None:
    healthy = [Job(2, 40) for _ in range(8)]
    world = World(healthy)
    world.run([(1, Cause.KILL)] * 24)
    assert all(job.outcome == "ok" for job in healthy)


def test_real_progress_forgets() -> None:
    suspicion = Suspicion()
    for made in itertools.islice(itertools.count(5, 16), 40):
        assert suspicion.died({1: Milestone(made, 1)}, [1], Cause.CRASH) == {}
        suspicion.progressed(1, Milestone(made + 16, 1))
    assert suspicion.died({1: Milestone(1000, 1)}, [1], Cause.CRASH) == {}
    suspicion.progressed(1, Milestone(1001, 1))
    assert suspicion.died({1: Milestone(1001, 1)}, [1], Cause.CRASH) == {1: 2}


def test_who_was_there_when_it_was_killed_gives_way() -> None:
    suspicion = Suspicion()
    in_flight = {1: Milestone(9, 3), 2: Milestone(8, 4)}
    waits = []
    for _ in range(3):
        suspicion.died(in_flight, [1], Cause.KILL)
        waits.append(suspicion.behind(1))
    assert 0 < waits[0] < waits[1] < waits[2] < 25, "yet it stays before those that are new"
    assert suspicion.behind(2) == 0
    suspicion.progressed(1, Milestone(10, 0))
    assert suspicion.behind(1) == 0
