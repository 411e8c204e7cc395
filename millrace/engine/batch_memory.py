"""How large the memory of the batch is, from turn to turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.books import Job, Seat
from millrace.engine.memory import NOTHING, Budget, Rectangle, roomy
from millrace.engine.turn import Reserve

PATIENCE = 100
"""Turns for which it may be larger than is wanted, as long as nobody else needs it."""
EARLY = 128
"""Tokens before it must be wider that it is told to become so: that can be done bit by bit."""
AT_ONCE = 1 << 24
"""Bytes that running rows hardly feel when they are taken; more comes layer by layer."""


class BatchMemory:
    def __init__(self, budget: Budget, *, gradual: bool = True) -> None:
        """`gradual` says that memory that no row needs yet comes layer by layer; else all of it comes with
        the step before rows join, which feels nothing else."""
        self._budget = budget
        self._gradual = gradual
        self.size = NOTHING
        self._there = NOTHING
        """What of it there is in every layer."""
        self._too_large_since: int | None = None
        """The turn from which on it has been more than is wanted."""

    def clear(self) -> None:
        self.size, self._there, self._too_large_since = NOTHING, NOTHING, None

    def settled(self) -> None:
        """There is as much as was told."""
        self._there = self.size

    def prepare(
        self, running: Sequence[Seat], ready: Sequence[Job], coming: Sequence[Job], rows: int
    ) -> tuple[Reserve | None, Rectangle | None]:
        """Take memory for prompts that are about to join rows that run, before they do.

        `coming` are all that hold memory of their own, those that are `ready` among them; `rows` is how
        many there will be when all that wait have joined. Returns what is to be told, and what those that
        join now must fit: None, if what they need is there, or so little that nobody feels it.
        """
        if not running or not coming:
            return None, None
        least = len(running) + sum(j.width for j in coming)
        width = max([*(s.held for s in running), *(j.length - 1 for j in ready)]) + 1
        told = None
        if not self.size.holds(least, width):
            # It comes bit by bit, and those that run become longer meanwhile.
            reach = max(s.held + s.left for s in running)
            early = max(width, min(width + EARLY, reach))
            size = self._larger(least, max(least, rows), early, self._held(coming))
            if size is None:
                return None, None
            self.size, self._too_large_since = size, None
            told = Reserve(size.slots, size.width)
        joining = len(running) + sum(j.width for j in ready)
        return told, None if not ready or self._there.holds(joining, width) else self._there

    def _larger(self, least: int, rows: int, width: int, others: int) -> Rectangle | None:
        """What there is to be for so many rows, or for the least if that is too much; None, if it is taken
        at once: it is little, or more than there is room for."""
        for most in (rows, least):
            size = roomy(most, width).around(self.size)
            taken = self._budget.rectangle(size, most)
            if taken + others <= self._budget.limit:
                return size if taken > AT_ONCE or not self._gradual else None
        return None

    def reserve(
        self,
        running: Sequence[Seat],
        coming: Sequence[Job],
        turn: int,
        *,
        joining: Sequence[Job] = (),
        more: int = 1,
    ) -> Reserve | None:
        """Have memory for the rows that run, those that join, and so many more tokens of each, beside what
        is `coming`; returns what is to be told, if anything."""
        lengths = [s.held for s in running]
        for job in joining:
            lengths += [job.length - 1] * job.width
        # Until a prompt has joined, it has its own.
        others = self._held((*coming, *joining[1:]))
        reach = max((s.held + s.left for s in running), default=0)
        if not self._have(len(lengths), max(lengths) + more, reach, others, turn):
            return None
        return Reserve(self.size.slots, self.size.width)

    def _held(self, jobs: Sequence[Job]) -> int:
        return sum(self._budget.row(j.length) for j in jobs)

    def _have(self, rows: int, width: int, reach: int, others: int, turn: int) -> bool:
        """Have room for so many rows of so many tokens beside the `others`; says whether it changes.

        `reach` is how many tokens the longest of them may come to have.
        """
        size = self._budget.size(self.size, rows, width, others)
        if size.area >= self.size.area or not self.size.holds(rows, width):
            self._too_large_since = None
        elif self._patient(rows, others, turn):
            size = self.size
        early = min(width + EARLY, reach)
        if size == self.size and early > size.width:
            wider = roomy(rows, early).around(size)
            if self._budget.rectangle(wider, rows) + others <= self._budget.limit:
                size = wider
        changed, self.size = size != self.size, size
        return changed

    def _patient(self, rows: int, others: int, turn: int) -> bool:
        """Whether what is more than wanted is kept for now: rows like those that left may come, and to
        give it back and take it again copies the batch twice."""
        if self._too_large_since is None:
            self._too_large_since = turn
        room = self._budget.rectangle(self.size, rows) + others <= self._budget.limit
        if room and turn - self._too_large_since < PATIENCE:
            return True
        self._too_large_since = None
        return False
