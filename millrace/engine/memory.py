"""What key-value state costs in bytes, measured on the model itself, and the budget it must fit.

Rows of a batch share one rectangle per layer, as wide as the longest of them: that, and not the sum
of their lengths, is what memory they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP = 256


@dataclass(frozen=True)
class StateCost:
    """Bytes of one row's state: so much per token, so much per token up to a window, so much flat."""

    per_token: int
    windowed: tuple[tuple[int, int], ...] = ()
    """(bytes per token, window) of layers that keep only the last tokens."""
    flat: int = 0

    def row(self, length: int) -> int:
        rounded = -(-length // STEP) * STEP
        windows = sum(each * min(rounded, window) for each, window in self.windowed)
        return self.flat + self.per_token * rounded + windows


@dataclass(frozen=True)
class Budget:
    cost: StateCost
    limit: int

    def row(self, length: int) -> int:
        return self.cost.row(length)

    def batch(self, lengths: Sequence[int]) -> int:
        return len(lengths) * self.cost.row(max(lengths)) if lengths else 0

    def fits(self, lengths: Sequence[int], others: int) -> bool:
        """Whether rows of these lengths in one batch fit beside `others` bytes."""
        return self.batch(lengths) + others <= self.limit
