"""The key-value memory of a running batch: rows in slots, left-aligned, each with its own length.

It stands in for mlx-lm's BatchKVCache where a layer's cache is a plain KVCache. There, every row
that joins or leaves copies the whole batch; here only that row moves. Rows of equal length need no
mask at all. A layer's cache is passive: how large it is, it is told, and one shared `Positions` says
where the rows write.

    slot 0  k k k k k k . .      lens   6 4 4
    slot 1  k k k k . . . .      width  7 in the next step
    slot 2  k k k k . . . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millrace.engine.memory import LONG, NOTHING, Rectangle
from millrace.engine.shapes import Shapes

_FEW = 1 << 14
"""Tokens of all rows up to which attention is little beside the rest of a step. Long rows take more of it
each, and become wider seldom."""


class Positions:
    """Where each row writes in this step, shared by all layers: computed once, on the host.

    Rows beyond those of the batch may run along, so that widths recur: they write into slots that
    nobody has, and nobody reads what they give.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self.lens: list[int] = []
        self.moved = 0
        """How often rows have come to lie elsewhere."""
        self.rows = 0
        """Rows of the step, those beyond the batch included."""
        self.width = 0
        self.tokens = 1
        self.uniform: int | None = None
        self.offset: int | mx.array = 0
        self._places: list[int] = []
        self._index: dict[int, tuple[mx.array, ...]] = {}
        self._masks: dict[int | None, mx.array | None] = {}

    def begin(self, tokens: int, slots: int | None) -> None:
        """Fix the write positions of the step about to be built, of so many tokens per row.

        `slots` is how many rows there is memory for; None where some layer knows none.
        """
        longest = max(self.lens)
        self.tokens = tokens
        self.rows = len(self.lens)
        if slots is not None:
            self.rows = max(self.rows, min(slots, self._shapes.rows(self.rows)))
        self.uniform = longest if min(self.lens) == longest else None
        if self.uniform is not None:
            self.width, self.offset = longest + tokens, longest
        else:
            # There is a mask anyway, and GPUs read keys faster at aligned widths.
            self.width = self._shapes.keys(longest + tokens)
            self._places = [*self.lens, *[0] * (self.rows - len(self.lens))]
            self.offset = mx.array(self._places, mx.int32)
        self._index = {}
        self._masks = {}

    def end(self, advanced: Sequence[int]) -> None:
        """The step has been built or read: so many tokens of each row are good."""
        self.lens = [n + more for n, more in zip(self.lens, advanced, strict=True)]

    def index(self, heads: int) -> tuple[mx.array, ...]:
        """Row, head and place of every token of the step, in one shape: layers have nothing to add."""
        if heads not in self._index:
            rows = mx.arange(self.rows, dtype=mx.int32)[:, None, None]
            first = mx.array(self._places, mx.int32)[:, None, None]
            at = first + mx.arange(self.tokens, dtype=mx.int32)
            each = mx.arange(heads, dtype=mx.int32)[:, None]
            self._index[heads] = tuple(mx.broadcast_arrays(rows, each, at))
        return self._index[heads]

    def mask(self, window: int | None, width: int) -> mx.array | None:
        """Which of `width` places a row may look at; None when all rows may look at all."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, width)
        return self._masks[window]

    def _make_mask(self, window: int | None, width: int) -> mx.array | None:
        at = mx.arange(width, dtype=mx.int32)
        if self.uniform is not None:
            if self.tokens == 1 and (window is None or width <= window):
                return None
            query = self.uniform + mx.arange(self.tokens, dtype=mx.int32)[:, None]
        else:
            lens = mx.array(self._places, mx.int32)[:, None, None, None]
            query = lens + mx.arange(self.tokens, dtype=mx.int32)[:, None]
        mask = at <= query
        return mask if window is None else mask & (at > query - window)


@dataclass(frozen=True)
class LayerShape:
    """What one layer's keys and values are made of."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    margin: int = 0
    """Tokens that memory for few is wider by than it is told to be."""

    @classmethod
    def of(cls, cache: KVCache, margin: int = 0) -> Self:
        """From a cache that has been used."""
        keys, values = cache.keys, cache.values
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, margin)

    def places(self, rows: int, width: int) -> int:
        """Places that each of so many rows has, for so many tokens."""
        few = rows * width < _FEW and width < LONG
        return width + self.margin if few else width

    def zeros(self, rows: int, places: int) -> tuple[mx.array, mx.array]:
        return (
            mx.zeros((rows, self.heads, places, self.key_dim), self.dtype),
            mx.zeros((rows, self.heads, places, self.value_dim), self.dtype),
        )

    def prompt(self, width: int) -> KVCache:
        """A single row's cache with room for so many tokens."""
        cache = KVCache()
        cache.keys, cache.values = self.zeros(1, self.places(1, width))
        return cache

    def widened(self, cache: KVCache, width: int, *, own: bool) -> KVCache:
        """A single row's cache with room for so many tokens, the state of another in it.

        With `own`, its memory is nobody else's.
        """
        places = self.places(1, width)
        if not own and (cache.keys.shape[2] == places or width <= cache.offset):
            return cache
        room = self.zeros(1, places - cache.offset)
        wide = KVCache()
        wide.keys = mx.concatenate([cache.keys[:, :, : cache.offset], room[0]], axis=2)
        wide.values = mx.concatenate([cache.values[:, :, : cache.offset], room[1]], axis=2)
        wide.offset = cache.offset
        return wide


HELD_TWICE = 1 << 21
"""Bytes of state from which on those that move are waited for, so that no more is held twice."""


class Move(NamedTuple):
    """A row goes from one slot to another; none comes from where one goes."""

    source: int
    target: int
    length: int
    """How many of its tokens."""


class SlotKVCache:
    """One layer's keys and values for all rows of the batch."""

    def __init__(self, positions: Positions, shape: LayerShape) -> None:
        self.at = positions
        self._shape = shape
        self.size = NOTHING
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        return self.at.offset

    @property
    def places(self) -> list[int]:
        """Where each row writes its next token."""
        return self.at.lens

    @property
    def moved(self) -> int:
        """Its memory is where it was as long as this is the same."""
        return self.at.moved

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        assert n == self.at.tokens
        return self.at.mask(window_size, self._looked_at)

    def _places(self, size: Rectangle) -> int:
        return self._shape.places(size.slots, size.width)

    @property
    def _looked_at(self) -> int:
        return min(self.at.width, self.size.width)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self.keys is not None and self.values is not None
        rows, uniform = self.at.rows, self.at.uniform
        if uniform is not None:
            self.keys[:rows, :, uniform : self.at.width] = keys
            self.values[:rows, :, uniform : self.at.width] = values
        else:
            index = self.at.index(keys.shape[1])
            self.keys[index] = keys
            self.values[index] = values
        width = self._looked_at
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def resize(self, size: Rectangle, rows: int, *, wait: bool = True) -> None:
        """Take more memory or give some back; the first `rows` slots are in use.

        With `wait` it is done when this returns, the values after the keys: the old memory is free before
        more is taken. Without, it is done with whatever is computed from it.
        """
        width = min(self.size.width, size.width) if rows else 0
        keys, values = self._shape.zeros(size.slots, self._places(size))
        self.size = size
        self.keys = _refilled(keys, self.keys, rows, width)
        if wait:
            mx.eval(self.keys)
        self.values = _refilled(values, self.values, rows, width)
        if wait:
            mx.eval(self.values)

    def join(self, first: int, row: KVCache, copies: int) -> None:
        """Put a prefilled row into slots first … first+copies-1."""
        length = row.offset
        if not length:
            if self.keys is not None and self.values is not None:
                # Whoever kept the state of the slot's last row may still look at this memory: a model
                # that writes in place must have other.
                self.keys[first : first + copies, :, :1] = 0
                self.values[first : first + copies, :, :1] = 0
            return
        assert self.keys is not None and self.values is not None
        alone = first == 0 and copies == self.size.slots == 1
        if alone and row.keys.shape[2] == self._places(self.size):
            # Memory of the same size that nobody else has: it changes hands.
            self.keys, self.values = row.keys, row.values
            return
        self.keys[first : first + copies, :, :length] = row.keys[..., :length, :]
        self.values[first : first + copies, :, :length] = row.values[..., :length, :]

    def taken(self, moves: Sequence[Move]) -> list[mx.array]:
        """Copies of the rows that are to move.

        They are copied out and not looked at where they are: whatever is written into memory that
        something else looks at makes a copy of it all.
        """
        assert self.keys is not None and self.values is not None
        return [_copied(a, move) for move in moves for a in (self.keys, self.values)]

    def put(self, moves: Sequence[Move], rows: Sequence[mx.array]) -> None:
        """Write rows that were taken to where they go."""
        assert self.keys is not None and self.values is not None
        for place, move in enumerate(moves):
            at = slice(move.target, move.target + 1)
            self.keys[at, :, : move.length] = rows[2 * place]
            self.values[at, :, : move.length] = rows[2 * place + 1]

    def view(self, row: int, length: int) -> KVCache:
        """One row as an ordinary cache, which holds on to the whole batch's memory."""
        cache = KVCache()
        if length and self.keys is not None and self.values is not None:
            cache.keys = self.keys[row : row + 1, :, :length]
            cache.values = self.values[row : row + 1, :, :length]
            cache.offset = length
        return cache

    @property
    def state(self) -> tuple[Any, ...]:
        return () if self.keys is None else (self.keys, self.values)

    def bytes_of(self, size: Rectangle) -> int:
        """What memory of this size takes."""
        shape = self._shape
        each: int = shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.size
        return size.slots * self._places(size) * each

    @property
    def nbytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return int(self.keys.nbytes + self.values.nbytes)


def _copied(array: mx.array, move: Move) -> mx.array:
    return mx.take(array[:, :, : move.length], mx.array([move.source], mx.int32), axis=0)


def _refilled(new: mx.array, old: mx.array | None, rows: int, width: int) -> mx.array:
    """New memory with what the first slots of the old hold."""
    if old is not None and width:
        kept = old[:rows, :, :width]
        if kept.shape == new.shape:
            # Writing all of an array makes it another name for what is written, and that would hold on to
            # all of the old memory.
            new = mx.contiguous(kept)
        else:
            new[:rows, :, :width] = kept
    return new


def resize_all(slots: Sequence[SlotKVCache], size: Rectangle, rows: int, most: int) -> None:
    """Give layers other memory, as many at a time as hold no more than `most` bytes twice."""
    some: list[SlotKVCache] = []
    held = 0
    for cache in slots:
        each = cache.bytes_of(size)
        if some and held + each > most:
            mx.eval([c.state for c in some])
            some, held = [], 0
        cache.resize(size, rows, wait=each > most)
        if each <= most:
            some.append(cache)
            held += each
    mx.eval([c.state for c in some])


def move_rows(slots: Sequence[SlotKVCache], moves: Sequence[Move], *, at_once: bool) -> None:
    """Copy rows to other slots, of as many layers at a time as may be held twice."""
    taken: list[tuple[SlotKVCache, list[mx.array]]] = []
    held = 0
    for place, cache in enumerate(slots):
        rows = cache.taken(moves)
        taken.append((cache, rows))
        held += sum(row.nbytes for row in rows)
        if held < HELD_TWICE and place + 1 < len(slots):
            continue
        if at_once:
            mx.eval([rows for _, rows in taken])
        for there, rows in taken:
            there.put(moves, rows)
        if at_once:
            mx.eval([there.state for there, _ in taken])
        taken, held = [], 0
