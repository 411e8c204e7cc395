"""A model whose forward pass is a program of stages: it stands where one of mlx-lm's stood.

It writes keys and values in place: into pages, or, of a single sequence, into the caches it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from millrace.native import attention, library
from millrace.native.adapters import NativeAdapters
from millrace.native.buffers import Buffers, PassTables
from millrace.native.items import Items, NativeRun, TokenRun
from millrace.native.lowrank import STEP
from millrace.native.memory import CacheMemory, NativePools, PageMemory
from millrace.native.packing import Array, aligned
from millrace.native.plan import Plan
from millrace.native.pool import Pool
from millrace.native.program import PassKind, Program, Writer

_MOST_PROGRAMS = 64


class NativeModel:
    in_place = True
    """Caches that it is given are written to where they lie: their memory must be nobody else's."""

    def __init__(self, plan: Plan, threads: int, args: Any) -> None:
        self.args = args
        self.layers = plan.layers
        self.adapters = NativeAdapters(plan)
        self._plan = plan
        self._pool = Pool(threads)
        self._size = Capacity()
        self._tables: PassTables | None = None
        self._buffers: Buffers | None = None
        self._angles: list[tuple[Array, Array]] = []
        self._programs: dict[PassKind, Program] = {}
        self._heads: list[Array] = []
        """Queries, keys and values of a token, layer by layer, where somebody looks at them."""
        self._written_for = 0
        """What the adapters had changed when the programs were written."""

    def parameters(self) -> dict[str, Any]:
        """What mlx-lm's models give: arrays of MLX's, of which there are none."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self._plan.nbytes

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self._plan.layers]

    def pools(self, pages: int) -> NativePools:
        """Key-value memory of this many pages."""
        return NativePools(self._plan, pages)

    def queries(self) -> list[mx.array | None]:
        """What the last token run with `peek` looks for in each layer that looks at all keys, shaped
        (heads, size) and scaled; None for layers with a window."""
        plan = self._plan
        asked = [heads[0, : plan.queries * plan.head_size] for heads in self._heads]
        return [
            None if layer.window else mx.array(found).reshape(plan.queries, plan.head_size)
            for layer, found in zip(plan.layers, asked, strict=True)
        ]

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        """Logits of every token of one sequence, run behind what its caches hold."""
        ids = np.array(tokens, np.int64)
        rows, count = ids.shape
        if rows != 1:
            raise ValueError(f"{rows} sequences run on pages, not on caches.")
        memory = CacheMemory(cache, self._plan.heads, self._plan.head_size, count)
        runs = [NativeRun(cache[0].offset, count)]
        logits = self._run(ids[0], runs, memory, None, np.arange(count), self.adapters.rows, False)
        for layer in cache:
            layer.offset += count
        assert logits is not None
        return logits[None]

    def run_pages(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int64],
        runs: Sequence[TokenRun],
        pools: NativePools,
        tables: Sequence[Sequence[int]],
        *,
        wanted: Sequence[int],
        positions: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
        peek: bool = False,
    ) -> mx.array | None:
        """Run tokens of several sequences, one run behind the other, on pages: logits of the `wanted`
        tokens, by their place in the pass; None if none are wanted.

        `tables` are the pages of each run's sequence, `adapters` each run's slot; without `positions`,
        tokens stand where they are written. With `peek`, which is for one token, `queries` has what it
        looks for.
        """
        return self._run(
            np.asarray(tokens, np.int64),
            runs,
            PageMemory(pools, tables),
            None if positions is None else np.asarray(positions, np.int64),
            np.asarray(wanted, np.int64),
            adapters,
            peek,
        )

    def _run(
        self,
        ids: npt.NDArray[np.int64],
        runs: Sequence[TokenRun],
        memory: CacheMemory | PageMemory,
        turns: npt.NDArray[np.int64] | None,
        wanted: npt.NDArray[np.int64],
        adapters: Sequence[int],
        peek: bool,
    ) -> mx.array | None:
        spread = np.concatenate([np.arange(r.first, r.first + r.count) for r in runs])
        turns = spread if turns is None else turns
        total, logits = len(ids), len(wanted)
        self._check(ids, runs, turns, wanted, adapters)
        if peek and total != 1:
            raise ValueError(f"{total} tokens run, and only one can be looked at.")
        counts = [run.count for run in runs]
        last = int(spread.max()) + 1
        width = -(-last // attention.BLOCK)
        begins = np.cumsum([0, *counts[:-1]])
        items = Items.of(self._plan, runs, begins.tolist(), width, self._pool.threads)
        adapted = any(adapters)
        padded, padded_logits = (library.padded_rows(n) if n else 0 for n in (total, logits))
        self._reserve(
            Capacity(
                padded,
                width * len(runs),
                padded_logits,
                max(last, int(turns.max()) + 1),
                len(items.items),
                len(items.merges),
                self.adapters.steps if adapted else 0,
            )
        )
        tables, buffers = self._tables, self._buffers
        assert tables is not None and buffers is not None
        memory.note(tables, runs, spread, width)
        tables.tokens[:total] = ids
        tables.positions[:total] = turns
        tables.chosen[:logits] = wanted
        tables.items[: len(items.items)] = items.items
        if items.merges:
            tables.merges[: len(items.merges)] = items.merges
        kind = PassKind.of(total, logits, self._pool.threads, items.few, adapted, peek)
        program = self._program(kind)
        self._pool.retire(program.records)
        program.count(total, logits, len(items.items), len(items.merges))
        if adapted:
            slots = np.repeat(np.array(adapters, np.int64), counts)
            program.count_adapted(*tables.note_adapters(slots, wanted))
        buffers.x[total:padded] = 0
        buffers.normed[logits:padded_logits] = 0
        self._pool.run(program.records)
        return mx.array(buffers.logits[:logits, : self._plan.vocabulary]) if logits else None

    def _check(
        self,
        ids: npt.NDArray[np.int64],
        runs: Sequence[TokenRun],
        turns: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        adapters: Sequence[int],
    ) -> None:
        """Kernels know no bounds: raise ValueError before they are led beyond them."""
        total, size = len(ids), self._plan.embedding.outputs
        if total != sum(run.count for run in runs) or any(run.count < 1 for run in runs):
            raise ValueError(f"{total} tokens are not those of the runs.")
        if not 0 <= ids.min() <= ids.max() < size:
            raise ValueError(f"Token ids are below {size}.")
        if turns.shape != (total,) or turns.min() < 0:
            raise ValueError(f"{total} tokens have {turns.size} positions, or some below 0.")
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < total:
            raise ValueError(f"Logits are wanted of tokens beyond the {total} that run.")
        if len(wanted) > total:
            raise ValueError(f"Logits of {len(wanted)} of {total} tokens are wanted.")
        if adapters and len(adapters) != len(runs):
            raise ValueError(f"{len(runs)} sequences have {len(adapters)} adapters.")

    def _program(self, kind: PassKind) -> Program:
        if self._written_for != self.adapters.changes:
            self._programs.clear()
            self._written_for = self.adapters.changes
        if kind not in self._programs:
            assert self._buffers and self._tables and self._angles
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            if kind.peek and not self._heads:
                width = (self._plan.queries + 2 * self._plan.heads) * self._plan.head_size
                self._heads = [aligned((1, width), np.float32) for _ in self._plan.layers]
            writer = Writer(
                kind,
                self._plan,
                self._buffers,
                self._tables,
                self._angles,
                self.adapters,
                self._heads,
            )
            self._programs[kind] = writer.write()
        return self._programs[kind]

    def _reserve(self, wanted: Capacity) -> None:
        """Have memory for a pass; programs point into it, so they are written anew when it grows."""
        size = self._size.with_room_for(wanted)
        if size == self._size:
            return
        plan, layers = self._plan, len(self._plan.layers)
        self._programs.clear()
        items = max(size.items, size.merges)
        self._tables = PassTables(layers, size.tokens, size.blocks, items)
        self._buffers = Buffers(
            plan, size.tokens, size.logits, size.items, self._pool.threads, size.steps * STEP
        )
        if size.places != self._size.places:
            self._angles = [angles.table(size.places) for angles in plan.angles]
        self._size = size


class Capacity(NamedTuple):
    """How much of everything there is memory for."""

    tokens: int = 0
    blocks: int = 0
    logits: int = 0
    places: int = 0
    items: int = 0
    merges: int = 0
    steps: int = 0
    """Of the ranks of adapters."""

    def with_room_for(self, wanted: Capacity) -> Capacity:
        least = (96, 64, 16, 1024, 64, 64)
        *has, steps = self
        *needs, more = wanted
        return Capacity(*[*map(_grown, has, needs, least), max(steps, more)])


def _grown(has: int, wanted: int, least: int) -> int:
    if wanted <= has:
        return has
    return -(-max(least, wanted + wanted // 4) // 48) * 48
