"""What key-value state costs in bytes, measured on the model itself, and the budget it must fit.

The rows of a batch share one rectangle per layer, as wide as the longest of them: that, and not the sum
of their lengths, is what memory they take. Prompts on their way hold state of their own. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STEP = 256
"""Tokens by which memory grows."""
LONG_STEP = 1024
LONG = 4096
TIGHT_STEP = 64
"""The same where memory is short."""


@dataclass(frozen=True)
class StateCost:
    """Bytes of one row's state: so much per token, so much per token up to a window, so much flat."""

    per_token: int
    windowed: tuple[tuple[int, int], ...] = ()
    """(bytes per token, window) of layers that keep only the last tokens."""
    flat: int = 0
    chunk: int = 0
    """Tokens that may have been run at once: windows hold so many more after it."""
    margin: int = 0
    """Tokens that memory may be wider by than it is told to be."""

    def uncut(self, length: int) -> int:
        """What does not grow with the length for ever."""
        held = ((each, min(length, window + self.chunk)) for each, window in self.windowed)
        return self.flat + sum(each * tokens for each, tokens in held)

    def row(self, width: int) -> int:
        """One row's state with room for so many tokens."""
        return self.per_token * (width + self.margin) + self.uncut(width)


@dataclass(frozen=True)
class Rectangle:
    """The memory of a batch: places for rows, and for tokens of each."""

    slots: int = 0
    width: int = 0

    @property
    def area(self) -> int:
        return self.slots * self.width

    def holds(self, rows: int, width: int) -> bool:
        return rows <= self.slots and width <= self.width

    def around(self, other: Rectangle) -> Rectangle:
        """The smallest that has room for what either has room for."""
        return Rectangle(max(self.slots, other.slots), max(self.width, other.width))


NOTHING = Rectangle()


@dataclass(frozen=True)
class Budget:
    cost: StateCost
    limit: int

    def width(self, length: int) -> int:
        """Places for the tokens of a prompt of so many: with some to spare, where there is room."""
        wide = capacity(length)
        return wide if self.cost.row(wide) <= self.limit else tight(1, length + 1).width

    def row(self, length: int) -> int:
        """What a prompt of so many tokens takes."""
        return self.cost.row(self.width(length))

    def rectangle(self, size: Rectangle, rows: int) -> int:
        places = size.slots * (size.width + self.cost.margin)
        return places * self.cost.per_token + rows * self.cost.uncut(size.width)

    def least(self, lengths: Sequence[int]) -> int:
        """What rows of these lengths take at least."""
        if not lengths:
            return 0
        return self.rectangle(tight(len(lengths), max(lengths)), len(lengths))

    def fits(self, lengths: Sequence[int], prompts: Iterable[int] = ()) -> bool:
        """Whether rows of these lengths fit beside the state of prompts of these."""
        return self.least(lengths) + sum(map(self.row, prompts)) <= self.limit

    def size(self, now: Rectangle, rows: int, width: int, others: int) -> Rectangle:
        """How large the batch's memory is to be for so many rows of so many tokens.

        Larger than needed where there is room beside the `others`, so that not every step copies;
        given back once it is twice what is wanted.
        """
        if not rows:
            return NOTHING
        wanted = roomy(rows, width)
        fits = self.rectangle(now, rows) + others <= self.limit
        if now.holds(rows, width) and fits and now.area <= 2 * wanted.area:
            return now
        if self.rectangle(wanted, rows) + others <= self.limit:
            return wanted
        return tight(rows, width)


def roomy(rows: int, width: int) -> Rectangle:
    # Spare slots save copies when rows join, and are too dear where rows are long.
    return Rectangle(round_slots(rows) if width < 8 * STEP else rows, capacity(width - 1))


def capacity(length: int) -> int:
    """Places for the tokens of a row that has so many and gets one more."""
    step = STEP if length < LONG else LONG_STEP
    return -(-(length + 1) // step) * step


def tight(rows: int, width: int) -> Rectangle:
    return Rectangle(rows, -(-width // TIGHT_STEP) * TIGHT_STEP)


def round_slots(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
