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

from collections import Counter, abc
from collections.abc import Callable, Collection, Iterator

from millrace.engine.memory import Budget
from millrace.engine.sequences import NO_GROUP, Prefill, Sequence, Stage, apart, lengths_of, rank

RESERVE_AFTER = 1.0
"""Seconds that the first in the queue waits for room before nobody may pass it any more."""
GROWTH = 64
"""Tokens that running rows must have room to grow by when another is to join them."""


class Scheduler:
    def __init__(
        self,
        max_running: int,
        budget: Budget,
        begin: Callable[[Prefill], None],
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
        self._waiting: list[Prefill] = []
        self._started: list[Prefill] = []
        self._ready: list[Prefill] = []
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

    def add(self, prefill: Prefill) -> None:
        prefill.stage = Stage.WAITING
        self._waiting.append(prefill)

    def prefills(self) -> Iterator[Prefill]:
        yield from self._waiting
        yield from self._started
        yield from self._ready

    def seeing(self) -> list[Prefill]:
        """The prompts with pictures that are not ready, in the order in which they should go on."""
        started = [j for j in self._started if j.request.media]
        waiting = [j for j in self._waiting if j.request.media and not j.blocked]
        return [*sorted(started, key=self._order), *sorted(waiting, key=self._order)]

    @property
    def ready(self) -> list[Prefill]:
        """Prompts that wait for nothing but to join."""
        return self._ready

    @property
    def coming(self) -> list[Prefill]:
        """Prompts that hold memory."""
        return [*self._started, *self._ready]

    def discard(self, prefill: Prefill) -> None:
        prefill.stage = Stage.OVER
        for queue in (self._waiting, self._started, self._ready):
            if prefill in queue:
                queue.remove(prefill)

    def ran(self, prefill: Prefill) -> None:
        """What has been run of a prompt is known."""
        if prefill.stage is Stage.STARTED and not prefill.left:
            self._started.remove(prefill)
            self._ready.append(prefill)
            prefill.stage = Stage.READY

    def open(self, running: abc.Sequence[Sequence], now: float) -> None:
        """Start the prompts that come first and whose state is all known: they can join at once."""
        self._look(running, now)
        while (
            (prefill := self._first(running)) is not None
            and prefill in self._waiting
            and not prefill.left
        ):
            self._start(prefill, running)
            self.ran(prefill)

    def joining(self, running: abc.Sequence[Sequence], now: float) -> list[Prefill]:
        """The prompts whose rows join the running ones now.

        One waits if rows have grown since it began, until there is memory for it again."""
        self._look(running, now)
        joined: list[Prefill] = []
        lengths = [s.length for s in running]
        group = self._group(running)
        for prefill in sorted((j for j in self._ready if j.group == group), key=self._order):
            with_it = [*lengths, *[prefill.length] * prefill.width]
            others = [j.length for j in self.coming if j is not prefill and j not in joined]
            first = not running and not joined
            if first or self._budget.fits([*(n + 1 for n in with_it), *others]):
                self._ready.remove(prefill)
                prefill.stage = Stage.OVER
                joined.append(prefill)
                lengths = with_it
        return joined

    def next_prompt(
        self,
        running: abc.Sequence[Sequence],
        now: float,
        planned: Collection[Prefill] = (),
        shared: Collection[Prefill] = (),
    ) -> Prefill | None:
        """The prompt to go on with beside those that are `planned` for the step; it has started. One that
        shares tokens with the `shared` ones does not start: it finds them later."""
        self._look(running, now)
        while (prefill := self._first(running, planned, shared)) is not None:
            if prefill in self._waiting:
                self._start(prefill, running)
            if prefill.waits:
                continue
            if not prefill.left:
                self.ran(prefill)
                continue
            return prefill
        return None

    def _look(self, running: abc.Sequence[Sequence], now: float) -> None:
        self._now = now
        self._held = Counter(s.request.caller for s in running)
        for prefill in self.coming:
            self._held[prefill.request.caller] += prefill.width
        if self.busy:
            self._pace = self._measured_pace()

    def victims(self, sequences: abc.Sequence[Sequence]) -> tuple[list[Prefill], list[Sequence]]:
        """What must leave so that the next step fits the memory; the last one may stay."""
        kept = in_turns([*sequences, *self.coming])
        gone: list[Prefill | Sequence] = []
        while len(kept) > 1 and not self._fits(kept):
            gone.append(kept.pop())
        return apart(gone)

    def _fits(self, kept: abc.Sequence[Prefill | Sequence]) -> bool:
        """Whether rows that grow by a token fit beside prompts that run."""
        return self._budget.fits(
            [each.held + 1 if isinstance(each, Sequence) else each.length for each in kept]
        )

    def displaced(self, sequences: abc.Sequence[Sequence]) -> tuple[list[Prefill], list[Sequence]]:
        """What gives way to the first in the queue, where that makes room: of callers with more rows, and
        of lower priority."""
        first = self._overdue(sequences) if self._waiting else None
        if first is None:
            return [], []
        least = self._below(first, sequences)
        gone: list[Prefill | Sequence] = []
        while least:
            gone.append(least.pop(0))
            stay = [s for s in sequences if s not in gone]
            coming = [j for j in self.coming if j not in gone]
            if self._has_room(first, stay, coming):
                first.promised = True
                return apart(gone)
        return [], []

    def _below(self, first: Prefill, sequences: abc.Sequence[Sequence]) -> list[Prefill | Sequence]:
        """What gives way to the first in the queue, the least first: rows of callers that have two more
        than its own, then what its own caller has of lower priority."""
        either: list[Prefill | Sequence] = [*self.coming, *sequences]
        caller, held = (
            first.request.caller,
            Counter(_caller(e) for e in either for _ in range(e.width)),
        )
        rows = in_turns(either)
        others: list[Prefill | Sequence] = []
        for each in reversed(rows):
            whose = _caller(each)
            if whose != caller and held[whose] - each.width > held[caller]:
                others.append(each)
                held[whose] -= each.width
        # What has waited long enough has caught up with what is more important.
        own = (e for e in either if e.priority < first.priority and rank(e) > rank(first))
        mine = [e for e in own if _caller(e) == caller]
        return [*others, *sorted(mine, key=lambda e: (e.priority, -e.arrived))]

    def demote(self, prefill: Prefill) -> None:
        """A prompt that was under way queues again."""
        self.discard(prefill)
        prefill.done = 0
        prefill.demoted = True
        self.add(prefill)

    def _start(self, prefill: Prefill, running: abc.Sequence[Sequence]) -> None:
        rows = _rows(running, self.coming)
        width = max(1, min(prefill.width, self._most - rows))
        while width > 1 and not self._has_room(prefill, running, self.coming, width):
            width -= 1
        if width < prefill.width:
            # Behind some that wait already: rows that are freed do not all go to one request.
            self.add(prefill.narrow(width, next(self._numbers), self._now))
        self._waiting.remove(prefill)
        self._started.append(prefill)
        self._held[prefill.request.caller] += prefill.width
        prefill.stage, prefill.promised = Stage.STARTED, False
        self._begin(prefill)

    def _first(
        self,
        running: abc.Sequence[Sequence],
        planned: Collection[Prefill] = (),
        shared: Collection[Prefill] = (),
    ) -> Prefill | None:
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

    def _free_row(self, running: abc.Sequence[Sequence]) -> bool:
        return _rows(running, self.coming) < max(1, self._most)

    def _overdue(self, running: abc.Sequence[Sequence]) -> Prefill | None:
        """The first in the queue, if it has waited long enough for room that it gets it."""
        if all(self._now - j.arrived < RESERVE_AFTER for j in self._waiting):
            return None
        group = self._group(running)
        queue = [j for j in self._waiting if not j.waits and j.group == group]
        first = min(queue, key=self._order, default=None)
        if first is None or self._now - first.arrived < RESERVE_AFTER:
            return None
        return None if self._may_start(first, running) else first

    def _order(self, prefill: Prefill) -> tuple[bool, int, float, int]:
        held = self._held[prefill.request.caller]
        return not prefill.promised, held, rank(prefill) + prefill.cost * self._pace, prefill.number

    def _may_start(self, prefill: Prefill, running: abc.Sequence[Sequence]) -> bool:
        if prefill.waits or prefill.group != self._group(running):
            return False
        if any(j.request is prefill.request for j in self._started):
            return False  # its state is on its way
        return self._has_room(prefill, running, self.coming)

    def _group(self, running: abc.Sequence[Sequence]) -> int:
        """Whose turn it is while a fault is traced: those that run, or the first held apart."""
        if running:
            return running[0].group
        return min((j.group for j in self.prefills() if j.group != NO_GROUP), default=NO_GROUP)

    def _has_room(
        self,
        prefill: Prefill,
        running: abc.Sequence[Sequence],
        coming: abc.Sequence[Prefill],
        width: int = 1,
    ) -> bool:
        """Whether there is room for so many of a prompt's rows beside those that run and come."""
        rows = _rows(running, coming)
        if rows == 0 and width == 1:
            return True
        if rows + width > self._most:
            return False
        lengths = [s.length for s in running] + lengths_of(coming) + [prefill.length] * width
        return self._budget.fits([n + GROWTH for n in lengths])


def _caller(each: Prefill | Sequence) -> str:
    return each.request.caller


def in_turns(mixed: abc.Sequence[Prefill | Sequence]) -> list[Prefill | Sequence]:
    """What holds rows, in the order in which it may keep them: of each caller the first, then the second,
    and so on."""
    ordered = sorted(mixed, key=lambda e: (-e.priority, e.arrived, e.number))
    seen: Counter[str] = Counter()
    places: dict[int, int] = {}
    for each in ordered:
        places[id(each)] = seen[_caller(each)]
        seen[_caller(each)] += 1
    return sorted(ordered, key=lambda e: places[id(e)])


def _rows(running: abc.Sequence[Sequence], coming: abc.Sequence[Prefill]) -> int:
    return len(running) + sum(j.width for j in coming)
