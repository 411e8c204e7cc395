"""Who runs next. Pure policy: it knows times, sizes and priorities, and no model.

Prompts are ordered by when they would be done if they came first: arrival plus their own cost beside what
runs, less a head start per priority. A short prompt so passes a long one, however much of that has been
run, and since the order of a waiting prompt stays about where it is while that of new ones gets worse, its
turn comes. Callers get equal numbers of rows where they contend: the prompt whose caller has the fewest
goes first, and one that has waited too long takes a row of a caller that has more. A priority orders the
prompts of one caller. A prompt starts when there is a free row and memory for it. One that is first and
has waited too long for room has it reserved: nobody behind it starts until it can. A wide one takes the
rows there are, and its others follow. When running rows outgrow the memory, the least of them gives way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from millrace.engine.books import NO_GROUP, Job, Seat, Stage, apart, lengths_of, rank
from millrace.engine.memory import Budget

RESERVE_AFTER = 1.0
"""Seconds that the first in the queue waits for room before nobody may pass it any more."""
GROWTH = 64
"""Tokens that running rows must have room to grow by when another is to join them."""


class Scheduler:
    def __init__(
        self,
        max_running: int,
        budget: Budget,
        begin: Callable[[Job], None],
        numbers: Iterator[int],
        pace: Callable[[], float],
    ) -> None:
        """`begin` is told of a prompt about to be run for the first time; less may be left then.
        `numbers` name prompts: the rows of a wide one that must wait become one of their own.
        `pace` says how many seconds a token of a prompt takes beside what runs."""
        self._most = max_running
        self._begin = begin
        self._numbers = numbers
        self._budget = budget
        self._waiting: list[Job] = []
        self._started: list[Job] = []
        self._ready: list[Job] = []
        self._held: Counter[str] = Counter()
        """Rows that run or are about to, by caller."""
        self._now = 0.0
        self._measured_pace = pace
        self._pace = 0.0

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

    def open(self, running: Sequence[Seat], now: float) -> None:
        """Start the prompts that come first and whose state is all known: they can join at once."""
        self._look(running, now)
        while (job := self._first(running)) is not None and job in self._waiting and not job.left:
            self._start(job, running)
            self.ran(job)

    def joining(self, running: Sequence[Seat], now: float) -> list[Job]:
        """The prompts whose rows join the running ones now.

        One waits if rows have grown since it began, until there is memory for it again."""
        self._look(running, now)
        joined: list[Job] = []
        lengths = [s.length for s in running]
        group = self._group(running)
        for job in sorted((j for j in self._ready if j.group == group), key=self._order):
            with_it = [*lengths, *[job.length] * job.width]
            others = [j.length for j in self.coming if j is not job and j not in joined]
            first = not running and not joined
            if first or self._budget.fits([*(n + 1 for n in with_it), *others]):
                self._ready.remove(job)
                job.stage = Stage.OVER
                joined.append(job)
                lengths = with_it
        return joined

    def next_prompt(
        self,
        running: Sequence[Seat],
        now: float,
        planned: Collection[Job] = (),
        shared: Collection[Job] = (),
    ) -> Job | None:
        """The prompt to go on with beside those that are `planned` for the step; it has started. One that
        shares tokens with the `shared` ones does not start: it finds them later."""
        self._look(running, now)
        while (job := self._first(running, planned, shared)) is not None:
            if job in self._waiting:
                self._start(job, running)
            if job.waits:
                continue
            if not job.left:
                self.ran(job)
                continue
            return job
        return None

    def _look(self, running: Sequence[Seat], now: float) -> None:
        self._now = now
        self._held = Counter(s.request.caller for s in running)
        for job in self.coming:
            self._held[job.request.caller] += job.width
        if self.busy:
            self._pace = self._measured_pace()

    def victims(self, seats: Sequence[Seat]) -> tuple[list[Job], list[Seat]]:
        """What must leave so that the next step fits the memory; the last one may stay."""
        kept = in_turns([*seats, *self.coming])
        gone: list[Job | Seat] = []
        while len(kept) > 1 and not self._fits(kept):
            gone.append(kept.pop())
        return apart(gone)

    def _fits(self, kept: Sequence[Job | Seat]) -> bool:
        """Whether rows that grow by a token fit beside prompts that run."""
        return self._budget.fits(
            [each.held + 1 if isinstance(each, Seat) else each.length for each in kept]
        )

    def displaced(self, seats: Sequence[Seat]) -> tuple[list[Job], list[Seat]]:
        """What gives way to the first in the queue, where that makes room: of callers with more rows, and
        of lower priority."""
        first = self._overdue(seats) if self._waiting else None
        if first is None:
            return [], []
        least = self._below(first, seats)
        gone: list[Job | Seat] = []
        while least:
            gone.append(least.pop(0))
            stay = [s for s in seats if s not in gone]
            coming = [j for j in self.coming if j not in gone]
            if self._has_room(first, stay, coming):
                first.promised = True
                return apart(gone)
        return [], []

    def _below(self, first: Job, seats: Sequence[Seat]) -> list[Job | Seat]:
        """What gives way to the first in the queue, the least first: rows of callers that have two more
        than its own, then what its own caller has of lower priority."""
        either: list[Job | Seat] = [*self.coming, *seats]
        caller, held = (
            first.request.caller,
            Counter(_caller(e) for e in either for _ in range(e.width)),
        )
        rows = in_turns(either)
        others: list[Job | Seat] = []
        for each in reversed(rows):
            whose = _caller(each)
            if whose != caller and held[whose] - each.width > held[caller]:
                others.append(each)
                held[whose] -= each.width
        # What has waited long enough has caught up with what is more important.
        own = (e for e in either if e.priority < first.priority and rank(e) > rank(first))
        mine = [e for e in own if _caller(e) == caller]
        return [*others, *sorted(mine, key=lambda e: (e.priority, -e.arrived))]

    def demote(self, job: Job) -> None:
        """A prompt that was under way queues again."""
        self.discard(job)
        job.done = 0
        job.demoted, job.promised = True, False
        self.add(job)

    def _start(self, job: Job, running: Sequence[Seat]) -> None:
        rows = _rows(running, self.coming)
        width = max(1, min(job.width, self._most - rows))
        while width > 1 and not self._has_room(job, running, self.coming, width):
            width -= 1
        if width < job.width:
            # Behind some that wait already: rows that are freed do not all go to one request.
            self.add(job.narrow(width, next(self._numbers), self._now))
        self._waiting.remove(job)
        self._started.append(job)
        self._held[job.request.caller] += job.width
        job.stage = Stage.STARTED
        self._begin(job)

    def _first(
        self,
        running: Sequence[Seat],
        planned: Collection[Job] = (),
        shared: Collection[Job] = (),
    ) -> Job | None:
        started = (j for j in self._started if not j.waits and j not in planned)
        first = min(started, key=self._order, default=None)
        if not self._waiting or not self._free_row(running):
            return first
        bounds = [self._order(j) for j in (first, self._overdue(running)) if j is not None]
        bound = min(bounds, default=None)
        before = self._waiting
        if bound is not None:
            before = [j for j in self._waiting if self._order(j) < bound]
        startable = (j for j in sorted(before, key=self._order) if self._may_start(j, running))
        return next((j for j in startable if not any(map(j.shares, shared))), first)

    def _free_row(self, running: Sequence[Seat]) -> bool:
        return _rows(running, self.coming) < max(1, self._most)

    def _overdue(self, running: Sequence[Seat]) -> Job | None:
        """The first in the queue, if it has waited long enough for room that it gets it."""
        if all(self._now - j.arrived < RESERVE_AFTER for j in self._waiting):
            return None
        group = self._group(running)
        queue = [j for j in self._waiting if not j.waits and j.group == group]
        first = min(queue, key=self._order, default=None)
        if first is None or self._now - first.arrived < RESERVE_AFTER:
            return None
        return None if self._may_start(first, running) else first

    def _order(self, job: Job) -> tuple[bool, int, float, int]:
        held = self._held[job.request.caller]
        return not job.promised, held, rank(job) + job.cost * self._pace, job.number

    def _may_start(self, job: Job, running: Sequence[Seat]) -> bool:
        if job.waits or job.group != self._group(running):
            return False
        if any(j.request is job.request for j in self._started):
            return False  # its state is on its way
        return self._has_room(job, running, self.coming)

    def _group(self, running: Sequence[Seat]) -> int:
        """Whose turn it is while a fault is traced: those that run, or the first held apart."""
        if running:
            return running[0].group
        return min((j.group for j in self.jobs() if j.group != NO_GROUP), default=NO_GROUP)

    def _has_room(
        self, job: Job, running: Sequence[Seat], coming: Sequence[Job], width: int = 1
    ) -> bool:
        """Whether there is room for so many of a prompt's rows beside those that run and come."""
        rows = _rows(running, coming)
        if rows == 0 and width == 1:
            return True
        if rows + width > self._most:
            return False
        lengths = [s.length for s in running] + lengths_of(coming) + [job.length] * width
        return self._budget.fits([n + GROWTH for n in lengths])


def _caller(each: Job | Seat) -> str:
    return each.request.caller


def in_turns(mixed: Sequence[Job | Seat]) -> list[Job | Seat]:
    """What holds rows, in the order in which it may keep them: of each caller the first, then the second,
    and so on."""
    ordered = sorted(mixed, key=lambda e: (-e.priority, e.arrived, e.number))
    seen: Counter[str] = Counter()
    places: dict[int, int] = {}
    for each in ordered:
        places[id(each)] = seen[_caller(each)]
        seen[_caller(each)] += 1
    return sorted(ordered, key=lambda e: places[id(e)])


def _rows(running: Sequence[Seat], coming: Sequence[Job]) -> int:
    return len(running) + sum(j.width for j in coming)
