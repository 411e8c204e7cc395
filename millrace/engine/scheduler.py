"""Who runs next. Pure policy: it knows times, sizes and priorities, and no model.

Prompts are ordered by when they would be done if they came first: arrival plus their own cost, less
a head start per priority. A short prompt so passes a long one, and since the order of a waiting
prompt never gets worse while that of new ones does, nobody starves. A prompt starts when there is a
free row and memory for it; when running rows outgrow the memory, the least of them gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from millrace.engine.latency_model import LatencyModel
from millrace.engine.memory import Budget

PRIORITY_SECONDS = 30.0
"""How much waiting one step of priority is worth."""
ALIKE = 2
"""A burst is of prompts of about one length: nobody waits for one so many times as long."""
PADDING = 24
"""A chunk may run this many tokens past a prompt's end: less than a chunk for another's rest costs."""
LEAST_SHARED = 32
"""Prompts share a chunk only for at least so many tokens each."""


class Task(Protocol):
    """A prompt on its way into the batch."""

    @property
    def arrived(self) -> float: ...
    @property
    def priority(self) -> int: ...

    @property
    def left(self) -> int:
        """Tokens still to run."""

    @property
    def reach(self) -> int:
        """Tokens that may be run at once; at most those left."""

    @property
    def blocked(self) -> bool:
        """Waiting for something that is not computed here."""

    @property
    def length(self) -> int:
        """Tokens of context when it joins."""

    @property
    def width(self) -> int:
        """Rows it becomes."""

    @property
    def fresh(self) -> bool:
        """Nothing of it has been run, and it may run beside others."""

    def narrow(self) -> Self:
        """Keep one row; the others become a task of their own."""

    def resembles(self, other: Any) -> bool:
        """Whether running one first saves work on the other."""


class Runner(Protocol):
    """A row of the batch."""

    @property
    def arrived(self) -> float: ...
    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Task)
R = TypeVar("R", bound=Runner)


class Scheduler(Generic[T]):
    def __init__(
        self,
        max_running: int,
        latency: LatencyModel,
        budget: Budget,
        begin: Callable[[T], None] = lambda task: None,
        burst: float = 2.0,
    ) -> None:
        """`begin` is told of a task about to be run for the first time; less may be left then.

        `burst` is how long prompts that are ready wait for others when nobody is being answered.
        """
        self._max_running = max_running
        self._burst_seconds = burst
        self._begin = begin
        self._latency = latency
        self._budget = budget
        self._waiting: list[T] = []
        self._started: list[T] = []
        """Prompts that have been run in part and hold memory."""
        self._ready: list[T] = []
        self._burst = 0.0
        """When the first of the ready ones became ready."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._started or self._ready)

    @property
    def stuck(self) -> bool:
        """Whether all there is waits for something that is not computed here."""
        return not self._started and not self._ready and all(t.blocked for t in self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._started) + len(self._ready)

    def add(self, task: T) -> None:
        self._waiting.append(task)

    def tasks(self) -> Iterator[T]:
        yield from self._waiting
        yield from self._started
        yield from self._ready

    def discard(self, task: T) -> None:
        for queue in (self._waiting, self._started, self._ready):
            if task in queue:
                queue.remove(task)

    def joining(self, running: Sequence[int], now: float) -> list[T]:
        """The tasks whose rows join those of these lengths in the batch now.

        While nobody is being answered, a burst of like prompts is prefilled first and joins as one:
        its rows then have no long gaps, and equal ones stay equal.
        Rows may have grown since a prompt began: it waits until the batch has room for it again.
        """
        if not self._ready:
            return []
        self._burst = self._burst or now
        if not running and (following := self._first([])) is not None:
            cost = following.left * self._latency.token_seconds
            alike = following.left <= ALIKE * max(t.length for t in self._ready)
            if alike and now + cost < self._burst + self._burst_seconds:
                return []
        joined: list[T] = []
        for task in list(self._ready):
            lengths = [*running, *_lengths((*joined, task))]
            alone = not running and not joined
            if alone or self._budget.fits([n + 1 for n in lengths], 0):
                self._ready.remove(task)
                joined.append(task)
        self._burst = 0.0
        return joined

    def next_chunk(self, running: Sequence[int]) -> tuple[list[T], int] | None:
        """The prompts to go on with, and how many tokens of each to run now.

        `running` holds the lengths of the rows in the batch. A prompt with nothing left to run is
        made ready on the way. Several at once are prompts of which nothing has been run: they
        begin at the same place, and those that end sooner have nothing to run after their end.
        """
        while (task := self._first(running)) is not None:
            if task in self._waiting:
                self._start(task, running)
            group = [task, *self._company(task, running)] if task.left else [task]
            count = 0
            if task.left:
                chunk = self._latency.chunk(task.left, len(running), self._coming(running))
                count = min(chunk, task.reach)
            if len(group) > 1:
                count = _shared([t.left for t in group])
            for done in [t for t in group if t.left <= count]:
                self._started.remove(done)
                self._ready.append(done)
            if count:
                return group, count
        return None

    def _coming(self, running: Sequence[int]) -> int:
        """Rows that are about to join those that run."""
        rows = sum(t.width for t in self.tasks())
        return min(rows, max(1, self._max_running - len(running)))

    def _company(self, task: T, running: Sequence[int]) -> list[T]:
        """Other prompts whose beginning can run beside that of `task` in one chunk."""
        limit = self._latency.limit(len(running), self._coming(running))
        group = [task]
        if not task.fresh or 2 * task.left > limit:
            return []
        for other in sorted((t for t in self._waiting if t.fresh), key=self._order):
            shared = _shared([t.left for t in (*group, other)])
            if (len(group) + 1) * shared > limit or shared < LEAST_SHARED:
                continue
            if any(other.resembles(t) for t in group):
                continue
            if self._may_start(other, running):
                self._start(other, running)
                if other.fresh:  # else its beginning was found, and it goes on by itself
                    group.append(other)
        return group[1:]

    def victims(self, rows: Sequence[R], lengths: Sequence[int]) -> list[int]:
        """Which rows must leave so that the next step fits the memory; the last one may stay."""
        held = sum(self._budget.row(t.length) for t in (*self._started, *self._ready))
        kept = sorted(range(len(rows)), key=lambda i: (-rows[i].priority, rows[i].arrived))
        gone: list[int] = []
        while len(kept) > 1 and not self._budget.fits([lengths[i] + 1 for i in kept], held):
            gone.append(kept.pop())
        return gone

    def _start(self, task: T, running: Sequence[int]) -> None:
        self._waiting.remove(task)
        self._started.append(task)
        self._begin(task)
        if task.width > 1 and not self._fits_beside(task, running):
            # It came alone and is still too wide: its rows take turns.
            self._waiting.append(task.narrow())

    def _first(self, running: Sequence[int]) -> T | None:
        startable = (t for t in self._waiting if self._may_start(t, running))
        return min((*self._started, *startable), key=self._order, default=None)

    def _order(self, task: T) -> float:
        cost = task.left * self._latency.token_seconds
        return task.arrived + cost - task.priority * PRIORITY_SECONDS

    def _may_start(self, task: T, running: Sequence[int]) -> bool:
        if task.blocked:
            return False
        coming = [*self._started, *self._ready]
        rows = len(running) + sum(t.width for t in coming)
        if rows == 0:
            return True
        if rows + task.width > self._max_running:
            return False
        return self._fits_beside(task, running)

    def _fits_beside(self, task: T, running: Sequence[int]) -> bool:
        coming = {*self._started, *self._ready, task}
        return self._budget.fits([n + 1 for n in (*running, *_lengths(coming))], 0)


def _shared(lefts: Sequence[int]) -> int:
    """How many tokens prompts run together: all of the longest, if the others are about as long."""
    longest, shortest = max(lefts), min(lefts)
    return longest if longest - shortest <= PADDING else shortest


def _lengths(tasks: Iterable[Task]) -> list[int]:
    return [t.length for t in tasks for _ in range(t.width)]
