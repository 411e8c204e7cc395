"""Who runs next. Pure policy: it knows times, sizes and priorities, and no model.

Prompts are ordered by when they would be done if they came first: arrival plus their own cost beside what
runs, less a head start per priority. A short prompt so passes a long one, however much of that has been
run, and since the order of a waiting prompt stays about where it is while that of new ones gets worse, its
turn comes. A prompt starts when there is a free row and memory for it. One that is first and has waited too
long for room has it reserved: nobody behind it starts until it can. A wide one takes the rows there are,
and its others follow. How many rows there may be is told (`row_limit.py`). When running rows outgrow the
memory, the least of them gives way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from millrace.engine.books import NO_GROUP, Job, Seat, Stage, apart, lengths_of, rank
from millrace.engine.latency_model import LatencyModel
from millrace.engine.memory import Budget, Rectangle
from millrace.engine.row_limit import RowLimit
from millrace.engine.shapes import Shapes

ALIKE = 2
"""A burst is of prompts of about one length: nobody waits for one so many times as long."""
RESERVE_AFTER = 1.0
"""Seconds that the first in the queue waits for room before nobody may pass it any more."""
GROWTH = 64
"""Tokens that running rows must have room to grow by when another is to join them."""
ROWS_AT_ONCE = 8
"""Rows that join running ones in one turn: copies would be felt; those of one prompt stay together."""
ROWS_AT_ONCE_ON_A_GPU, OF_THE_READY = 4, 3
"""The same where a row's copy is a launch for every layer, however short it is; or one in so many of those
that are ready, if that is more, so that a batch of short answers is full."""
LEAVING = 4
"""Turns in a row for which rows leave, before others join in the same."""
LEAST_SHARED = 32
"""Prompts share a chunk only for at least so many tokens each."""


class Scheduler:
    def __init__(
        self,
        max_running: int,
        latency: LatencyModel,
        budget: Budget,
        shapes: Shapes,
        begin: Callable[[Job], None],
        numbers: Iterator[int],
        burst: float = 2.0,
    ) -> None:
        """`begin` is told of a prompt about to be run for the first time; less may be left then.
        `numbers` name prompts: the rows of a wide one that must wait become one of their own.
        `burst` is how long prompts that are ready wait for others when nobody is being answered."""
        self._limit = RowLimit(max_running, latency)
        self._burst_seconds = burst
        self._begin = begin
        self._numbers = numbers
        self._latency = latency
        self._budget = budget
        self._shapes = shapes
        self._waiting: list[Job] = []
        self._started: list[Job] = []
        self._ready: list[Job] = []
        self._burst: float | None = None
        """When the first of the ready ones became ready."""
        self._short = False
        """Some that are ready wait for memory, which comes the sooner if nothing else is run."""
        self._chunks: deque[int] = deque([0], maxlen=3 if shapes.recurring else 2)
        """Prompt tokens of this turn and of those before that its step may feel: a GPU lags behind."""
        self._put_off = False
        """Some that are ready join with the next step, which should feel nothing else."""
        self._left = 0
        """In so many turns up to this one rows have left."""
        self._now = 0.0
        self._pace = latency.token_seconds
        """Seconds for each token of a prompt, beside what runs."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._started or self._ready)

    @property
    def stuck(self) -> bool:
        """Whether all there is waits for something that is not computed here."""
        return not self._ready and all(j.waits for j in (*self._started, *self._waiting))

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._started) + len(self._ready)

    def add(self, job: Job) -> None:
        job.stage = Stage.WAITING
        self._waiting.append(job)

    def jobs(self) -> Iterator[Job]:
        yield from self._waiting
        yield from self._started
        yield from self._ready

    def seeing(self) -> list[Job]:
        """The prompts with pictures that are not ready, in the order in which they should go on."""
        started = [j for j in self._started if j.request.media]
        waiting = [j for j in self._waiting if j.request.media and not j.blocked]
        return [*sorted(started, key=self._order), *sorted(waiting, key=self._order)]

    @property
    def ready(self) -> list[Job]:
        """Prompts that wait for nothing but to join."""
        return self._ready

    @property
    def coming(self) -> list[Job]:
        """Prompts that hold memory."""
        return [*self._started, *self._ready]

    def discard(self, job: Job) -> None:
        job.stage = Stage.OVER
        for queue in (self._waiting, self._started, self._ready):
            if job in queue:
                queue.remove(job)

    def ran(self, job: Job) -> None:
        """What has been run of a prompt is known."""
        if job.stage is Stage.STARTED and not job.left:
            self._started.remove(job)
            self._ready.append(job)
            job.stage = Stage.READY

    def stepped(self, running: Sequence[Seat]) -> None:
        """A step of these rows was decided."""
        self._limit.stepped(running)

    def open(self, running: Sequence[Seat], now: float, *, left: bool) -> None:
        """Start the prompts that come first and whose state is all known: they can join at once, unless
        rows have `left`, which those that run feel as well."""
        self._chunks.append(0)
        self._left = self._left + 1 if left else 0
        self._limit.look(running, _rows(running, self.coming), self._waiting, now)
        self._look(running, now)
        at_once = self._joins(len(running)) if running else math.inf
        while len(self._ready) < at_once and (job := self._found(running)) is not None:
            self._start(job, running)
            self.ran(job)

    def _found(self, running: Sequence[Seat]) -> Job | None:
        """The prompt that comes first, if it has yet to start and nothing of it is to be run."""
        job = self._first(running)
        return None if job is None or job.left or job not in self._waiting else job

    def joining(
        self, running: Sequence[Seat], now: float, within: Rectangle | None = None
    ) -> list[Job]:
        """The prompts whose rows join the running ones now; memory for rows beyond those `within` is on
        its way.

        While nobody is being answered, a burst of like prompts is prefilled first and joins as one:
        its rows then have no long gaps, and equal ones stay equal.
        One waits if rows have grown since it began, until the batch has room for it again."""
        self._look(running, now)
        self._short = self._put_off = False
        if not self._ready:
            return []
        if self._burst is None:
            self._burst = now
        if not running and (following := self._first([])) is not None:
            cost = following.left * self._pace
            alike = following.left <= ALIKE * max(j.length for j in self._ready)
            if alike and now + cost < self._burst + self._burst_seconds:
                return []
        joined: list[Job] = []
        ready = sum(j.width for j in self._ready)
        on_a_gpu = max(ROWS_AT_ONCE_ON_A_GPU, ready // OF_THE_READY)
        at_once: float = on_a_gpu if self._shapes.recurring else ROWS_AT_ONCE
        at_once = min(at_once, self._joins(len(running)))
        lengths = [s.length for s in running]
        group = self._group(running)
        for job in sorted((j for j in self._ready if j.group == group), key=self._order):
            with_it = [*lengths, *[job.length] * job.width]
            if within is not None and not within.holds(len(with_it), job.length):
                self._short = True
                continue
            if running and len(with_it) > len(running) + at_once and (joined or not at_once):
                self._put_off = self._latency.promised < math.inf
                continue
            others = [j.length for j in self.coming if j is not job and j not in joined]
            first = not running and not joined
            if first or self._budget.fits([n + 1 for n in with_it], others):
                self._ready.remove(job)
                job.stage = Stage.OVER
                joined.append(job)
                lengths = with_it
        self._burst = None
        return joined

    def _joins(self, running: int) -> float:
        """How many rows may join for the sake of streams that have settled."""
        if self._latency.promised == math.inf:
            return math.inf
        chunk = max(self._chunks)
        # A GPU's gap has one such thing: launches for every layer, or a chunk, whose time is a guess.
        other = self._shapes.recurring and (chunk or 0 < self._left <= LEAVING)
        return 0 if other else self._latency.joins(running, chunk)

    def next_chunk(self, running: Sequence[Seat], now: float) -> tuple[list[Job], int] | None:
        """The prompts to go on with, and how many tokens of each to run now.

        Several at once are prompts of which nothing has been run: they begin at the same place, and
        those that end sooner have nothing to run after their end.
        """
        self._look(running, now)
        if self._short or self._put_off:
            return None
        if running and self._latency.promised < math.inf and self._found(running) is not None:
            return None  # it is put into the batch when nothing else is felt
        while (job := self._first(running)) is not None:
            if job in self._waiting:
                self._start(job, running)
            if job.waits:
                continue
            if not job.left:
                self.ran(job)
                continue
            group = [job, *self._company(job, running)]
            if len(group) > 1:
                longest = max(j.left for j in group)
                self._chunks[-1] = len(group) * self._shapes.length(longest)
                return group, longest
            chunk = self._latency.chunk(job.left, len(running), self.coming_rows(running))
            if chunk < job.left:
                fit = self._shapes.coarse if job.request.media else self._shapes.whole
                chunk = fit(chunk)
            self._chunks[-1] = min(chunk, job.reach)
            return [job], self._chunks[-1]
        return None

    def coming_rows(self, running: Sequence[Seat]) -> int:
        """Rows that are about to join those that run; those with pictures are no reason for long gaps,
        since what they wait for is mostly not the prompt's turn."""
        most = self._limit.rows - len(running)
        rows = 0
        for job in self.jobs():
            if rows >= most:
                break
            if not job.request.media and not job.unscored:
                rows += job.width
        return max(1, min(rows, most))

    def _look(self, running: Sequence[Seat], now: float) -> None:
        self._now = now
        if self.busy:
            self._pace = self._latency.pace(len(running), self.coming_rows(running))

    def _company(self, job: Job, running: Sequence[Seat]) -> list[Job]:
        """Other prompts that can run beside `job` in one chunk, to their ends.

        What a shorter one is padded by must cost less than a chunk of its own would.
        """
        limit = self._latency.limit(len(running), self.coming_rows(running))
        if not job.fresh or not self._shapes.padding or 2 * job.left > limit:
            return []
        padding = self._latency.worth
        group = [job]
        fresh = (j for j in (*self._started, *self._waiting) if j.fresh and j is not job)
        for other in sorted(fresh, key=self._order):
            lefts = [j.left for j in (*group, other)]
            longest, shortest = max(lefts), min(lefts)
            if len(lefts) * self._shapes.length(longest) > limit or shortest < LEAST_SHARED:
                continue
            if longest - shortest > padding or any(other.resembles(j) for j in group):
                continue
            if other in self._waiting:
                if not self._may_start(other, running):
                    continue
                self._start(other, running)
            if other.fresh:  # else its beginning was found, and it goes on by itself
                group.append(other)
        return group[1 : self._shapes.company(len(group))]

    def victims(self, seats: Sequence[Seat]) -> tuple[list[Job], list[Seat]]:
        """What must leave so that the next step fits the memory; the last one may stay."""
        either: list[Job | Seat] = [*seats, *self.coming]
        kept = sorted(either, key=lambda e: (-e.priority, e.arrived, e.number))
        gone: list[Job | Seat] = []
        while len(kept) > 1 and not self._fits(kept):
            gone.append(kept.pop())
        return apart(gone)

    def _fits(self, kept: Sequence[Job | Seat]) -> bool:
        """Whether rows that grow by a token fit beside prompts that run."""
        rows = [s.held + 1 for s in kept if isinstance(s, Seat)]
        return self._budget.fits(rows, [j.length for j in kept if isinstance(j, Job)])

    def displaced(self, seats: Sequence[Seat]) -> tuple[list[Job], list[Seat]]:
        """What of lower priority gives way to the first in the queue, where that makes room."""
        first = self._overdue(seats) if self._waiting else None
        if first is None:
            return [], []
        # What has waited long enough has caught up with what is more important.
        either: list[Job | Seat] = [*self.coming, *seats]
        least = sorted(
            (e for e in either if e.priority < first.priority and rank(e) > rank(first)),
            key=lambda e: (e.priority, -e.arrived),
        )
        gone: list[Job | Seat] = []
        while least:
            gone.append(least.pop(0))
            stay = [s for s in seats if s not in gone]
            coming = [j for j in self.coming if j not in gone]
            if self._has_room(first, stay, coming, most=self._limit.most):
                first.promised = True
                return apart(gone)
        return [], []

    def demote(self, job: Job) -> None:
        """A prompt that was under way queues again."""
        self.discard(job)
        job.done = 0
        job.demoted, job.promised = True, False
        self.add(job)

    def _start(self, job: Job, running: Sequence[Seat]) -> None:
        rows = _rows(running, self.coming)
        width = max(1, min(job.width, self._limit.of(job) - rows))
        while width > 1 and not self._has_room(job, running, self.coming, width):
            width -= 1
        if width < job.width:
            # Behind some that wait already: rows that are freed do not all go to one request.
            self.add(job.narrow(width, next(self._numbers), self._now))
        self._waiting.remove(job)
        self._started.append(job)
        job.stage = Stage.STARTED
        self._begin(job)

    def _first(self, running: Sequence[Seat]) -> Job | None:
        first = min((j for j in self._started if not j.waits), key=self._order, default=None)
        if not self._waiting or not self._free_row(running):
            return first
        bounds = [self._order(j) for j in (first, self._overdue(running)) if j is not None]
        bound = min(bounds, default=None)
        before = self._waiting
        if bound is not None:
            before = [j for j in self._waiting if self._order(j) < bound]
        startable = (j for j in sorted(before, key=self._order) if self._may_start(j, running))
        return next(startable, first)

    def _free_row(self, running: Sequence[Seat]) -> bool:
        rows = _rows(running, self.coming)
        return rows == 0 or any(rows < self._limit.of(j) for j in self._waiting)

    def _overdue(self, running: Sequence[Seat]) -> Job | None:
        """The first in the queue, if it has waited long enough for room that it gets it."""
        if all(self._now - j.arrived < RESERVE_AFTER for j in self._waiting):
            return None
        group = self._group(running)
        queue = [j for j in self._waiting if not j.waits and j.group == group]
        first = min(queue, key=self._order, default=None)
        if first is None or self._now - first.arrived < RESERVE_AFTER:
            return None
        # Where it waits for the sake of settled streams only, there is no room to keep for it.
        return None if self._may_start(first, running, self._limit.most) else first

    def _order(self, job: Job) -> tuple[bool, float, int]:
        return not job.promised, rank(job) + job.cost * self._pace, job.number

    def _may_start(self, job: Job, running: Sequence[Seat], most: int = 0) -> bool:
        if job.waits or job.group != self._group(running):
            return False
        if any(j.request is job.request for j in self._started):
            return False  # its state is on its way
        return self._has_room(job, running, self.coming, most=most)

    def _group(self, running: Sequence[Seat]) -> int:
        """Whose turn it is while a fault is traced: those that run, or the first held apart."""
        if running:
            return running[0].group
        return min((j.group for j in self.jobs() if j.group != NO_GROUP), default=NO_GROUP)

    def _has_room(
        self,
        job: Job,
        running: Sequence[Seat],
        coming: Sequence[Job],
        width: int = 1,
        most: int = 0,
    ) -> bool:
        """Whether there is room for so many of a prompt's rows beside those that run and come; as many as
        there may `most` be, or as there should be for now."""
        rows = _rows(running, coming)
        if rows == 0 and width == 1:
            return True
        if rows + width > (most or self._limit.of(job)):
            return False
        lengths = [s.length for s in running] + lengths_of(coming) + [job.length] * width
        prompts = [j.length for j in coming] + [job.length]
        return self._budget.fits([n + GROWTH for n in lengths], prompts)


def _rows(running: Sequence[Seat], coming: Sequence[Job]) -> int:
    return len(running) + sum(j.width for j in coming)
