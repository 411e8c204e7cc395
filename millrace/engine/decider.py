"""What the engine does next: a pure function of what has been seen, with a memory of its own.

It sees the clock's reading, the messages, what the last turn brought and what was measured, and returns
one turn. It holds no array and asks nobody: the same readings give the same turns, so that a recorded
run can be replayed and a whole day of scheduling simulated in a test.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import cast

import msgspec

from millrace.cache.index import PrefixIndex
from millrace.cache.residency import Operations
from millrace.engine.batch_memory import BatchMemory
from millrace.engine.books import Job, Phase, Seat
from millrace.engine.cache_use import CacheUse
from millrace.engine.latency_model import LatencyModel
from millrace.engine.learning import Learning
from millrace.engine.memory import Budget
from millrace.engine.pictures import Pictures
from millrace.engine.prompts import Prompts
from millrace.engine.quarantine import Quarantine
from millrace.engine.requests import RequestBook, TurnDraft
from millrace.engine.scheduler import Scheduler
from millrace.engine.shapes import Shapes
from millrace.engine.specprefill.scorings import Scorings
from millrace.engine.speculation import Speculation
from millrace.engine.turn import (
    Drop,
    Finish,
    Forward,
    Join,
    Outcome,
    Read,
    RowResult,
    Sample,
    Seen,
    Turn,
    TurnOperation,
)

log = logging.getLogger("millrace.engine")


class DeciderSettings(msgspec.Struct, frozen=True):
    """What the decider is told once."""

    max_running: int = 32
    chunk: int = 512
    """The most prompt tokens of a chunk."""
    max_stall: float | None = None
    burst: float = 2.0
    speculate: int = 0
    pipelined: bool = False
    """Whether a step is launched before the tokens of the last one are read."""


class Decider:
    def __init__(
        self,
        settings: DeciderSettings,
        budget: Budget,
        shapes: Shapes,
        cache: CacheUse | None = None,
        *,
        trimmable: bool = True,
        picture_room: int = 0,
        whole_pictures: bool = False,
        scorings: Scorings | None = None,
    ) -> None:
        """`picture_room` is how many bytes the features of pictures may take; with `whole_pictures` no
        chunk has a part of one. `scorings` is the work of a draft, where there is one."""
        self._settings = settings
        self._budget = budget
        self._shapes = shapes
        self._cache = cache
        self._trimmable = trimmable
        self._latency = LatencyModel(settings.chunk, settings.max_stall, shapes.grain)
        numbers = itertools.count(1)
        self._scheduler = Scheduler(
            settings.max_running,
            self._latency,
            budget,
            shapes,
            self._begin,
            numbers,
            settings.burst,
        )
        self._pictures = Pictures(picture_room, whole=whole_pictures)
        self._requests = RequestBook(
            self._scheduler, budget, cache, self._pictures, numbers, scorings
        )
        self._speculation = (
            Speculation(settings.speculate, self._latency) if settings.speculate else None
        )
        self._learning = Learning(self._latency, self._speculation, pipelined=settings.pipelined)
        what = self._scheduler, self._requests, budget, shapes, self._learning, cache
        self._prompts = Prompts(*what, self._pictures, scorings)
        self._guessing = False
        """The last step had guesses: how far its rows have come is known when it has been read."""
        self._quarantine = Quarantine()
        self._turns = itertools.count(1)
        self._draft = TurnDraft(Turn(0))
        self._running: list[Seat] = []
        self._memory = BatchMemory(budget, gradual=not shapes.recurring)
        self._drawn = False
        """There are draws that nobody has read."""
        self.again: float | None = None
        """In how many seconds there is something to decide, even if nothing happens."""

    # What others ask

    @property
    def busy(self) -> bool:
        return bool(self._requests.seats or self._drawn or self._prompts.running)

    @property
    def stuck(self) -> bool:
        """Whether all there is waits for the disk, or for the front's pictures."""
        idle = not (self._running or self._drawn or self._pictures.waits or self._prompts.scoring)
        return idle and self._scheduler.stuck

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def held(self) -> int:
        """Bytes of key-value state that there should be."""
        prompts = sum(self._budget.row(j.length) for j in self._scheduler.coming)
        return self._budget.rectangle(self._memory.size, len(self._running)) + prompts

    @property
    def longest(self) -> int:
        """Tokens of the longest row or prompt that holds state."""
        return max(
            [*(s.held for s in self._running), *(j.length for j in self._scheduler.coming)],
            default=0,
        )

    @property
    def pictures(self) -> Pictures:
        return self._pictures

    @property
    def draft_cached(self) -> int:
        """Bytes that the draft's own cache holds."""
        return self._prompts.draft_cached

    @property
    def cache(self) -> PrefixIndex | None:
        return self._cache.index if self._cache else None

    def closing(self, now: float) -> Operations:
        """What is still to be done when the engine ends."""
        operations: Operations = []
        if self._cache is not None:
            self._cache.index.close(operations, now)
        return operations

    def state(self) -> object:
        """All of the scheduling state as plain values, to be compared."""
        return (
            [(s.number, s.tokens, s.phase.name, s.held, s.unread, s.group) for s in self._running],
            [
                (j.number, j.stage.name, j.done, j.cached, j.hit, [s.number for s in j.seats])
                for j in self._scheduler.jobs()
            ],
            sorted(self._requests.seats),
            self._memory.size,
        )

    # The decision

    def decide(self, seen: Seen) -> Turn:
        self._draft = draft = TurnDraft(Turn(next(self._turns)), seen.now)
        self._learn(seen.outcome)
        if self._cache is not None:
            jobs = list(self._scheduler.jobs())
            self._cache.observe(seen.disk, jobs, self._draft.out, self._draft.now)
        for message in seen.messages:
            self._requests.receive(message, draft)
        draft.turn.wanted = self._pictures.plan(self._scheduler.seeing(), draft.out)
        left = self._leave()
        self._scheduler.open(self._running, draft.now, left=left)
        self._admit_ready()
        self._step()
        self._next_chunk()
        if self._cache is not None:
            self.again = self._cache.index.tick(draft.out, draft.now, idle=not self.busy)
        draft.turn.operations = cast("list[TurnOperation]", draft.out)
        return draft.turn

    # What the last turn brought

    def _learn(self, outcome: Outcome) -> None:
        if outcome.settled:
            self._memory.settled()
        for failed in outcome.failed:
            assert failed.id is not None
            self._requests.abort(failed.id, None, self._draft)
        for result in outcome.rows:
            self._take(self._requests.seats[result.row], result)
        if outcome.step_fault is not None:
            self._step_fault(outcome.step_fault)
        elif outcome.rows:
            self._quarantine.stepped(self._running)
        for seen in outcome.pictures:
            self._pictures.ran(seen)
            for id in seen.requests if seen.problem is not None else ():
                self._requests.fail(
                    id, f"The picture could not be read: {seen.problem}", self._draft
                )
        self._learning.learn(outcome)
        self._prompts.ran(outcome, self._draft)

    def _take(self, seat: Seat, result: RowResult) -> None:
        if seat.unread:
            seat.unread -= 1
        seat.tokens += result.tokens
        if result.guessed and self._speculation is not None:
            self._speculation.confirmed(seat, result.guessed, result.advanced - 1)
        if seat.phase is Phase.RUNNING and self._guessing:
            seat.held += result.advanced
        if result.problem is not None:
            self._requests.fail(seat.request.id, result.problem, self._draft)
        elif result.finish is not None:
            self._requests.end(seat)
        elif seat.phase is Phase.LEFT and not seat.unread:
            if seat.left > 0:
                self._requests.requeue(seat, self._draft)
            else:
                self._draft.out.append(Finish(seat.number, "length"))
                self._requests.end(seat)

    def _step_fault(self, text: str) -> None:
        """The batch is lost: its rows go again, and whose fault it was is traced."""
        seats, self._running = self._running, []
        self._memory.clear()
        self._drawn = False
        alive = [s for s in seats if s.phase is Phase.RUNNING]
        for seat in seats:
            seat.unread = 0
            if seat.phase is Phase.ENDED:
                self._requests.seats.pop(seat.number, None)
        for seat in [s for s in self._requests.seats.values() if s.phase is Phase.LEFT]:
            seat.unread = 0
            self._requests.requeue(seat, self._draft)
        guilty = self._quarantine.fault(alive)
        for seat in alive:
            seat.phase = Phase.QUEUED
            if seat in guilty:
                self._requests.fail(
                    seat.request.id,
                    f"The model could not be run on this request: {text}",
                    self._draft,
                )
            else:
                self._requests.requeue(seat, self._draft)

    # The batch

    def _leave(self) -> bool:
        """Drop the rows that are done or no longer have room in memory; says whether there were any."""
        leaving = [s for s in self._running if s.phase is Phase.ENDED or s.spent]
        staying = [s for s in self._running if s not in leaving] if leaving else self._running
        groups = [j.group for j in self._scheduler.jobs()]
        demoted, yielding = self._scheduler.victims(staying)
        if self._quarantine.apart(staying, groups):
            yielding = staying
        else:
            after = [s for s in staying if s not in yielding] if yielding else staying
            jobs, rows = self._scheduler.displaced(after)
            demoted, yielding = demoted + jobs, yielding + rows
        for job in demoted:
            self._prompts.demote(job, self._draft)
        for seat in yielding:
            log.info("request %s gives way to others", seat.request.id)
        if yielding:
            staying = [s for s in staying if s not in yielding]
        if len(staying) == 1 and not self._scheduler.coming:
            staying, leaving = self._alone(staying, leaving)
        gone = [*leaving, *yielding]
        if not gone:
            return False
        for seat in gone:
            if self._cache is not None:
                self._cache.row(seat, self._draft.out, self._draft.now)
        self._draft.out.append(Drop([s.number for s in gone]))
        self._running = staying
        for seat in gone:
            self._left(seat)
        if not staying:
            self._memory.clear()
        return True

    def _left(self, seat: Seat) -> None:
        if seat.phase is Phase.ENDED:
            self._requests.seats.pop(seat.number, None)
        elif seat.unread:
            seat.phase = Phase.LEFT
        else:
            self._requests.requeue(seat, self._draft)

    def _alone(self, staying: list[Seat], leaving: list[Seat]) -> tuple[list[Seat], list[Seat]]:
        """A row that has all the memory to itself ends where that ends."""
        seat = staying[0]
        if self._budget.least([seat.held + 1]) <= self._budget.limit:
            return staying, leaving
        log.warning(
            "request %s ends after %d tokens: all %.1f MiB of key-value memory are its own, and full; "
            "raise --kv-memory for longer answers",
            seat.request.id,
            len(seat.tokens),
            self._budget.limit / 2**20,
        )
        seat.most = len(seat.tokens) + seat.unread
        if not seat.unread:
            self._draft.out.append(Finish(seat.number, "length"))
            seat.phase = Phase.ENDED
        return [], [*leaving, seat]

    def _admit_ready(self) -> None:
        """Let prompts that have been run join, as far as the batch's memory is there."""
        scheduler, running = self._scheduler, self._running
        rows = len(running) + scheduler.coming_rows(running)
        told, within = self._memory.prepare(running, scheduler.ready, scheduler.coming, rows)
        self._draft.out += [told] if told else []
        if jobs := scheduler.joining(running, self._draft.now, within):
            self._learning.joined(sum(j.width for j in jobs))
            self._reserve(jobs)
        for job in jobs:
            self._draft.out.append(Join(job.number, [s.number for s in job.seats]))
            for seat in job.seats:
                seat.phase, seat.held, seat.steps = Phase.RUNNING, job.length - 1, 0
            self._running += job.seats

    def _reserve(self, joining: Sequence[Job] = (), more: int = 1) -> None:
        """Have memory for the rows that run, those that join, and so many more tokens of each."""
        coming, turn = self._scheduler.coming, self._draft.turn.number
        if told := self._memory.reserve(self._running, coming, turn, joining=joining, more=more):
            self._draft.out.append(told)

    def _step(self) -> None:
        operations = self._draft.out
        if not self._running:
            if self._drawn:
                operations.append(Read())
            self._guessing = self._drawn = False
            self._learning.step(0, 0)
            return
        guesses = self._guesses()
        ahead = max(map(len, guesses.values()), default=0)
        self._guessing = bool(ahead)
        self._learning.step(len(self._running), ahead)
        self._scheduler.stepped(self._running)
        self._reserve(more=1 + ahead)
        operations.append(Forward(guesses))
        if self._settings.pipelined:
            if self._drawn:
                operations.append(Read())
            operations.append(Sample())
        else:
            operations += [Sample(), Read()]
        self._drawn = self._settings.pipelined
        for seat in self._running:
            seat.unread += 1
            if not ahead:
                seat.held += 1

    def _guesses(self) -> dict[int, list[int]]:
        if self._speculation is None or not self._trimmable or self._settings.pipelined:
            return {}
        proposed = self._speculation.propose(self._running) or [[]] * len(self._running)
        guesses = {s.number: g for s, g in zip(self._running, proposed, strict=True) if g}
        ahead = max(map(len, guesses.values()), default=0)
        widths = [s.held + 1 + ahead for s in self._running]
        prompts = [j.length for j in self._scheduler.coming]
        return guesses if self._budget.fits(widths, prompts) else {}

    def _begin(self, job: Job) -> None:
        if self._running:
            self._reserve(more=0)  # it takes what the batch has too much
        self._prompts.begin(job, self._draft)

    def _next_chunk(self) -> None:
        rows = len(self._running)
        if self._prompts.something_else(self._draft, rows):
            return
        planned = self._scheduler.next_chunk(self._running, self._draft.now)
        if planned is not None:
            self._prompts.run(*planned, self._draft, wait=not self._running)
        elif self._prompts.encode(self._draft, rows) or self._prompts.score(self._draft, rows):
            return
        else:
            self._learning.chunk(0, None)
        self._draft.turn.expected = self._learning.expected(len(self._running))
