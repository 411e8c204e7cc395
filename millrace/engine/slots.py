"""The key-value memory of a running batch: rows in slots, left-aligned, each with its own length.

It stands in for mlx-lm's BatchKVCache where a layer's cache is a plain KVCache. There, every row
that joins or leaves copies the whole batch; here only that row moves. Rows of equal length need no
mask at all. A layer's cache is passive: the batch advances one shared `Positions` per step.

    slot 0  k k k k k k . .      lens   6 4 4
    slot 1  k k k k . . . .      width  7 in the next step
    slot 2  k k k k . . . .
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

_ALIGN = 8


class Positions:
    """Where each row writes in this step, shared by all layers: computed once, on the host."""

    def __init__(self) -> None:
        self.lens: list[int] = []
        self.width = 0
        self.tokens = 1
        self.uniform: int | None = None
        self.offset: int | mx.array = 0
        self._index: tuple[mx.array, mx.array] | None = None
        self._masks: dict[int | None, mx.array | None] = {}

    def begin(self, tokens: int = 1) -> None:
        """Fix the write positions of the step about to be built, of so many tokens per row."""
        longest = max(self.lens)
        self.tokens = tokens
        self.uniform = longest if min(self.lens) == longest else None
        if self.uniform is not None:
            self.width, self.offset = longest + tokens, longest
        else:
            # There is a mask anyway, and GPUs read keys faster at aligned widths.
            self.width = -(-(longest + tokens) // _ALIGN) * _ALIGN
            self.offset = mx.array(self.lens, mx.int32)
        self._index = None
        self._masks = {}

    def end(self, generated: Sequence[int] | None = None) -> None:
        """The step has been built; of a step of several tokens, so many of each row are good."""
        generated = generated or [1] * len(self.lens)
        self.lens = [n + more for n, more in zip(self.lens, generated, strict=True)]

    def index(self) -> tuple[mx.array, mx.array]:
        """Row and place of every token of the step, to go with a middle axis of heads."""
        if self._index is None:
            rows = mx.arange(len(self.lens), dtype=mx.int32)[:, None, None]
            first = mx.array(self.lens, mx.int32)[:, None, None]
            self._index = rows, first + mx.arange(self.tokens, dtype=mx.int32)
        return self._index

    def mask(self, window: int | None) -> mx.array | None:
        """Which positions a row may look at; None when all rows may look at all of them."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> mx.array | None:
        at = mx.arange(self.width, dtype=mx.int32)
        if self.uniform is not None:
            if self.tokens == 1 and (window is None or self.width <= window):
                return None
            query = self.uniform + mx.arange(self.tokens, dtype=mx.int32)[:, None]
        else:
            lens = mx.array(self.lens, mx.int32)[:, None, None, None]
            query = lens + mx.arange(self.tokens, dtype=mx.int32)[:, None]
        mask = at <= query
        return mask if window is None else mask & (at > query - window)


class SlotKVCache:
    """One layer's keys and values for all rows of the batch."""

    STEP = 256

    def __init__(self, positions: Positions) -> None:
        self.at = positions
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        return self.at.offset

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        assert n == self.at.tokens
        return self.at.mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows, width, uniform = len(self.at.lens), self.at.width, self.at.uniform
        self._reserve(rows, width, keys, values)
        assert self.keys is not None and self.values is not None
        if uniform is not None:
            self.keys[:rows, :, uniform:width] = keys
            self.values[:rows, :, uniform:width] = values
        else:
            row, at = self.at.index()
            heads = mx.arange(keys.shape[1], dtype=mx.int32)[:, None]
            self.keys[row, heads, at] = keys
            self.values[row, heads, at] = values
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def join(self, first: int, row: KVCache, copies: int) -> None:
        """Put a prefilled row into slots first … first+copies-1."""
        length = row.offset
        if not length:
            return
        keys, values = row.keys[..., :length, :], row.values[..., :length, :]
        self._reserve(first + copies, length + 1, keys, values)
        assert self.keys is not None and self.values is not None
        self.keys[first : first + copies, :, :length] = keys
        self.values[first : first + copies, :, :length] = values

    def move(self, source: int, target: int, length: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def view(self, row: int, length: int) -> KVCache:
        """One row as an ordinary cache, which holds on to the whole batch's memory."""
        cache = KVCache()
        if length and self.keys is not None and self.values is not None:
            cache.keys = self.keys[row : row + 1, :, :length]
            cache.values = self.values[row : row + 1, :, :length]
            cache.offset = length
        return cache

    def _reserve(self, rows: int, width: int, keys: mx.array, values: mx.array) -> None:
        if self.keys is not None and rows <= self.keys.shape[0] and width <= self.keys.shape[2]:
            return
        have_rows, have_width = (0, 0) if self.keys is None else self.keys.shape[0:3:2]
        # Spare slots save copies when rows join, and are too dear where rows are long.
        slots = max(have_rows, _round_slots(rows) if width < 2048 else rows)
        step = self.STEP if width < 4096 else 4 * self.STEP
        cap = max(have_width, -(-width // step) * step)
        self.keys = _grown(self.keys, slots, cap, keys)
        self.values = _grown(self.values, slots, cap, values)

    @property
    def state(self) -> tuple[Any, ...]:
        return () if self.keys is None else (self.keys, self.values)

    @property
    def nbytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return int(self.keys.nbytes + self.values.nbytes)


def _round_slots(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def _grown(old: mx.array | None, slots: int, cap: int, like: mx.array) -> mx.array:
    new = mx.zeros((slots, like.shape[1], cap, like.shape[3]), like.dtype)
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new
