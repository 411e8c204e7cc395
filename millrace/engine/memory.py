"""What key-value state costs in bytes, and the budget that it must fit. Pure.

State lies in pages: a sequence takes whole pages for its tokens, and nothing is padded to the longest.
Layers with a sliding window hold pages for the last tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StateCost:
    """Bytes of one sequence's state: per token, per token up to a window, and once."""

    per_token: int
    windowed: tuple[tuple[int, int], ...] = ()
    """(bytes per token, window) of layers that keep only the last tokens."""
    flat: int = 0
    chunk: int = 0
    """Tokens that one pass may add: windows hold that many more during it."""
    page: int = 1
    """Tokens of a page."""

    def pages(self, tokens: int) -> int:
        """Pages for this many tokens."""
        return -(-tokens // self.page)

    def uncut(self, length: int) -> int:
        """What does not grow with the length for ever."""
        return self.flat + sum(
            each * self.page * min(self.pages(length), self.pages(window + self.chunk) + 1)
            for each, window in self.windowed
        )

    def row(self, length: int) -> int:
        """The state of one sequence of this many tokens."""
        return self.per_token * self.page * self.pages(length) + self.uncut(length)


@dataclass(frozen=True)
class Budget:
    cost: StateCost
    limit: int

    def row(self, length: int) -> int:
        """The state of one sequence of this many tokens."""
        return self.cost.row(length)

    def total(self, lengths: Iterable[int]) -> int:
        return sum(map(self.cost.row, lengths))

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths fit."""
        return self.total(lengths) <= self.limit
