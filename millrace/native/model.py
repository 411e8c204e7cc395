"""A model whose forward pass is a program of stages: it stands where one of mlx-lm's stood.

It writes keys and values into the memory of the caches it is given, in place, behind what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from millrace.native import attention, library
from millrace.native.adapters import NativeAdapters
from millrace.native.lowrank import STEP
from millrace.native.packing import Array, aligned
from millrace.native.plan import Plan
from millrace.native.pool import Pool
from millrace.native.program import UNITS, Buffers, PassTables, Program, Writer

_MOST_PROGRAMS = 64
_ITEMS_PER_THREAD = 6
_STEP = 256
"""A cache that must grow does so by whole multiples of this."""


class NativeModel:
    in_place = True
    """Caches that it is given are written to where they lie: their memory must be nobody else's."""

    def __init__(self, plan: Plan, threads: int, args: Any) -> None:
        self.args = args
        self.layers = plan.layers
        self.grain = library.tile_shape()[0]
        """Tokens of a prompt that are computed at once: fewer take as long."""
        self.adapters = NativeAdapters(plan)
        self._plan = plan
        self._pool = Pool(threads)
        self._size = Capacity()
        self._tables: PassTables | None = None
        self._buffers: Buffers | None = None
        self._angles: list[tuple[Array, Array]] = []
        self._programs: dict[tuple[int, int, bool, bool, bool], Program] = {}
        self._heads: list[Array] = []
        """Queries, keys and values of a token, layer by layer, where somebody looks at them."""
        self._written_for = 0
        """What the adapters had changed when the programs were written."""
        self._found: tuple[Any, int, int, PassTables] | None = None
        """The batch whose memory the tables tell, and how often it had moved by then."""
        self._width = 0

    def parameters(self) -> dict[str, Any]:
        """What mlx-lm's models give: arrays of MLX's, of which there are none."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self._plan.nbytes

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self._plan.layers]

    def __call__(
        self, tokens: mx.array, cache: list[Any], deltas: mx.array | None = None
    ) -> mx.array:
        """Logits of every token; `deltas` is what each row's positions are beyond its places."""
        logits = self.run(tokens, cache, logits=True, deltas=deltas)
        assert logits is not None
        return logits

    def peek(self, token: mx.array, cache: list[Any]) -> tuple[mx.array, list[mx.array | None]]:
        """Run one token of one row: its logits, and what it looks for in each layer that looks at all
        keys, shaped (heads, size) and scaled; None for layers with a window."""
        plan = self._plan
        if not self._heads:
            width = (plan.queries + 2 * plan.heads) * plan.head_size
            self._heads = [aligned((1, width), np.float32) for _ in plan.layers]
        logits = self.run(token, cache, logits=True, peek=True)
        assert logits is not None
        asked = [heads[0, : plan.queries * plan.head_size] for heads in self._heads]
        return logits, [
            None if layer.window else mx.array(found).reshape(plan.queries, plan.head_size)
            for layer, found in zip(plan.layers, asked, strict=True)
        ]

    def run(
        self,
        tokens: mx.array,
        cache: list[Any],
        *,
        logits: bool,
        positions: Sequence[int] | None = None,
        deltas: mx.array | None = None,
        peek: bool = False,
    ) -> mx.array | None:
        """Run some tokens of each row behind what the caches hold; logits of all of them, or none.

        They stand at the `positions` (of one row), or as far beyond their places as `deltas` say.
        """
        ids = np.array(tokens, dtype=np.int64)
        rows, count = ids.shape
        if not 0 <= ids.min() <= ids.max() < self._plan.embedding.outputs:
            raise ValueError(f"Token ids are below {self._plan.embedding.outputs}.")
        places = self._places(cache, rows, count)
        total = rows * count
        spread = (np.asarray(places, np.int64)[:, None] + np.arange(count)).reshape(-1)
        turns = spread
        if positions is not None:
            turns = np.asarray(positions, np.int64)
            if turns.shape != (total,) or turns.min() < 0:
                raise ValueError(f"{total} tokens have {turns.size} positions, or some below 0.")
        elif deltas is not None:
            turns = spread + np.repeat(np.array(deltas, dtype=np.int64), count)
        wanted = total if logits else 0
        padded = library.padded_rows(total)
        items = Items.of(self._plan, places, count, self._pool.threads)
        adapted = bool(self.adapters.rows)
        if self._written_for != self.adapters.changes:
            self._programs.clear()
            self._written_for = self.adapters.changes
        self._reserve(
            Capacity(
                padded,
                rows,
                padded if logits else 0,
                max(max(places) + count, int(turns.max()) + 1),
                len(items.items),
                len(items.merges),
                self.adapters.steps if adapted else 0,
            )
        )
        tables, buffers = self._tables, self._buffers
        assert tables is not None and buffers is not None
        self._find_memory(cache, rows)
        if max(places) + count > self._width:
            raise ValueError(f"{count} more tokens are beyond the {self._width} there is room for.")
        tables.tokens[:total] = ids.reshape(-1)
        tables.places[:total] = spread
        tables.positions[:total] = turns
        tables.rows[:total] = np.repeat(np.arange(rows), count)
        tables.items[: len(items.items)] = items.items
        if items.merges:
            tables.merges[: len(items.merges)] = items.merges
        program = self._program(total, wanted, items.few, adapted, peek)
        records = program.records
        self._pool.retire(records)
        records[program.attending, UNITS] = len(items.items)
        records[program.merging, UNITS] = len(items.merges)
        if adapted:
            self._note_adapters(tables, program, rows, count)
        buffers.x[total:padded] = 0
        self._pool.run(records)
        for layer in cache:
            if isinstance(layer, KVCache):
                layer.offset += count
        if not logits:
            return None
        found = buffers.logits[:total, : self._plan.vocabulary]
        return mx.array(found).reshape(rows, count, -1)

    def _note_adapters(self, tables: PassTables, program: Program, rows: int, count: int) -> None:
        """Which tokens have an adapter, and which."""
        if len(self.adapters.rows) != rows:
            raise ValueError(f"{rows} rows have {len(self.adapters.rows)} adapters.")
        slots = np.repeat(np.array(self.adapters.rows, np.int64), count)
        chosen = np.flatnonzero(slots)
        tables.slots[: rows * count] = slots
        tables.adapted[: len(chosen)] = chosen
        for stage, each in program.adapting:
            program.records[stage, UNITS] = len(chosen) * each

    def _places(self, cache: list[Any], rows: int, count: int) -> list[int]:
        """Where the rows' next tokens stand; caches are given the room for them."""
        first = cache[0]
        if isinstance(first, KVCache):
            places = [first.offset] * rows
            for layer in cache:
                self._widen(layer, rows, count)
        else:
            places = list(first.places)
        return places

    def _find_memory(self, cache: list[Any], rows: int) -> None:
        """Note where rows lie, unless that has been done and nothing has moved since."""
        assert self._tables is not None
        found = None
        if not isinstance(cache[0], KVCache):
            found = cache[0], cache[0].moved, rows, self._tables
        if found is None or self._found != found:
            mx.eval([array for layer in cache for array in (layer.keys, layer.values)])
            self._width = _note_memory(self._tables, cache, rows)
        self._found = found

    def _widen(self, layer: KVCache, rows: int, count: int) -> None:
        needed = layer.offset + count
        if layer.keys is not None and layer.keys.shape[2] >= needed:
            return
        width = -(-needed // _STEP) * _STEP
        shape = (rows, self._plan.heads, width, self._plan.head_size)
        keys, values = mx.zeros(shape), mx.zeros(shape)
        if layer.keys is not None and layer.offset:
            keys[:, :, : layer.offset] = layer.keys[:, :, : layer.offset]
            values[:, :, : layer.offset] = layer.values[:, :, : layer.offset]
        layer.keys, layer.values = keys, values

    def _program(self, tokens: int, logits: int, few: bool, adapted: bool, peek: bool) -> Program:
        key = tokens, logits, few, adapted, peek
        if key not in self._programs:
            assert self._buffers and self._tables and self._angles
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            adapters = self.adapters if adapted else None
            heads = self._heads if peek else ()
            writer = Writer(self._plan, self._buffers, self._tables, self._angles, adapters, heads)
            self._programs[key] = writer.write(tokens, logits, few=few)
        return self._programs[key]

    def _reserve(self, wanted: Capacity) -> None:
        """Have memory for a pass; programs point into it, so they are written anew when it grows."""
        size = self._size.with_room_for(wanted)
        if size == self._size:
            return
        plan, layers = self._plan, len(self._plan.layers)
        self._programs.clear()
        self._tables = PassTables(layers, size.tokens, size.rows, max(size.items, size.merges))
        self._buffers = Buffers(
            plan, size.tokens, size.logits, size.items, self._pool.threads, size.steps * STEP
        )
        if size.places != self._size.places:
            self._angles = [angles.table(size.places) for angles in plan.angles]
        self._size = size


@dataclass(frozen=True)
class Capacity:
    """How much of everything there is memory for."""

    tokens: int = 0
    rows: int = 0
    logits: int = 0
    places: int = 0
    items: int = 0
    merges: int = 0
    steps: int = 0
    """Of the ranks of adapters."""

    def with_room_for(self, wanted: Capacity) -> Capacity:
        least = (96, 16, 16, 1024, 64, 64)
        *has, steps = astuple(self)
        *needs, more = astuple(wanted)
        return Capacity(*[*map(_grown, has, needs, least), max(steps, more)])


def _grown(has: int, wanted: int, least: int) -> int:
    if wanted <= has:
        return has
    return -(-max(least, wanted + wanted // 4) // 48) * 48


@dataclass(frozen=True)
class Items:
    """What there is to attend to in a pass."""

    items: list[tuple[int, ...]]
    merges: list[tuple[int, ...]]
    few: bool
    """Whether every item has so few queries that small tiles suit it."""

    @classmethod
    def of(cls, plan: Plan, places: list[int], count: int, threads: int) -> Items:
        group = plan.queries // plan.heads
        at_once = _tokens_at_once(group, len(places) * plan.heads * count, threads)
        spread = count * group <= attention.MOST_SPLIT and len(places) * plan.heads < 4 * threads
        items: list[tuple[int, ...]] = []
        merges: list[tuple[int, ...]] = []
        for row, place in enumerate(places):
            for first in range(0, count, at_once):
                some = min(at_once, count - first)
                start, token = place + first, row * count + first
                blocks = -(-(start + some) // attention.BLOCK)
                for head in range(plan.heads):
                    one = (row, head, token, some, start)
                    if spread and blocks > 1:
                        slot = len(items)
                        merges.append((*one, slot, slot + blocks, -1))
                        items += [(*one, k, k + 1, slot + k) for k in range(blocks)]
                    else:
                        items.append((*one, 0, blocks, -1))
        if not spread:
            # The longest first, so that no thread is left alone with one at the end.
            items.sort(key=lambda item: -item[6])
        return cls(items, merges, count * group <= 4)


def _tokens_at_once(group: int, tokens: int, threads: int) -> int:
    """Tokens of an item, where there are so many for all heads: every thread is to have some items."""
    rows = library.tile_shape()[0]
    # Their queries fill whole tiles, where so many fit an item.
    step = rows // math.gcd(rows, group)
    most = attention.MOST_QUERIES // group
    wanted = min(most, -(-tokens // (_ITEMS_PER_THREAD * threads)))
    return min(most, -(-wanted // step) * step)


def _note_memory(tables: PassTables, cache: list[Any], rows: int) -> int:
    """Note where each row's keys and values lie; returns how many tokens there is room for."""
    numbers = np.arange(rows)
    widths: list[int] = []
    for number, layer in enumerate(cache):
        for name, table in (("keys", tables.keys), ("values", tables.values)):
            seen = np.array(getattr(layer, name), copy=False)
            if not seen.flags.c_contiguous:
                whole = mx.contiguous(getattr(layer, name))
                mx.eval(whole)
                setattr(layer, name, whole)
                seen = np.array(whole, copy=False)
            table[number, :rows] = seen.ctypes.data + numbers * seen.strides[0]
        tables.strides[number, :rows] = seen.strides[1]
        if seen.shape[0] < rows:
            raise ValueError(f"A layer has memory for {seen.shape[0]} of {rows} rows.")
        widths.append(seen.shape[2])
    return min(widths)
