"""How large the memory of the batch is, from turn to turn. Pure."""

from __future__ import annotations

from millrace.engine.memory import NOTHING, Budget

PATIENCE = 100
"""Turns for which it may be larger than is wanted, as long as nobody else needs it."""
EARLY = 64
"""Tokens before it must be wider that it is told to become so: that can be done bit by bit."""


class BatchMemory:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = NOTHING
        self._too_large_since: int | None = None
        """The turn from which on it has been more than is wanted."""

    def clear(self) -> None:
        self.size, self._too_large_since = NOTHING, None

    def have(self, rows: int, width: int, reach: int, others: int, turn: int) -> bool:
        """Have room for so many rows of so many tokens beside the `others`; says whether it changes.

        `reach` is how many tokens the longest of them may come to have.
        """
        size = self._budget.size(self.size, rows, width, others)
        early = min(width + EARLY, reach)
        if size == self.size and early > size.width:
            wider = self._budget.size(size, rows, early, others)
            if self._budget.rectangle(wider, rows) + others <= self._budget.limit:
                size = wider
        if size.area >= self.size.area or not self.size.holds(rows, width):
            self._too_large_since = None
        elif self._patient(rows, others, turn):
            return False
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
