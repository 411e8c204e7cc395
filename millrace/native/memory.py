"""Where a pass finds and leaves keys and values: pages of all sequences, or one sequence's caches."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from millrace.native.attention import BLOCK
from millrace.native.buffers import PassTables
from millrace.native.items import TokenRun
from millrace.native.packing import Array
from millrace.native.plan import Plan

_STEP = 256
"""A cache that must grow does so by whole multiples of this."""
_FLOAT = np.dtype(np.float32)
_NOTHING = np.zeros(0, _FLOAT)


class NativePools:
    """Keys and values of all layers in pages of `BLOCK` tokens, [pages, heads, tokens, size] each.

    Memory that no page has been written to takes no room: the system gives it on the first write.
    """

    def __init__(self, plan: Plan, pages: int) -> None:
        self._page = (plan.heads, BLOCK, plan.head_size)
        self._regions = [[self._region(pages) for _ in plan.layers] for _ in range(2)]
        self.keys, self.values = ([self._seen(r) for r in regions] for regions in self._regions)
        self.addresses = self._addresses()
        """Where each layer's keys begin, and each layer's values."""

    def __len__(self) -> int:
        """Pages of a layer."""
        return len(self.keys[0])

    def resize(self, pages: int) -> None:
        """Have this many pages; the contents of those that stay are kept.

        The system moves a layer's memory where it can. Where it cannot, or somebody looks at it, it is
        copied: one layer is held twice then.
        """
        try:
            for pools, regions in zip((self.keys, self.values), self._regions, strict=True):
                for layer in range(len(regions)):
                    pools[layer] = _NOTHING  # since memory that is looked at cannot move
                    try:
                        regions[layer] = self._resized(regions[layer], pages)
                    finally:
                        pools[layer] = self._seen(regions[layer])
        finally:
            self.addresses = self._addresses()

    @property
    def page_bytes(self) -> int:
        """Of one layer's keys."""
        return int(np.prod(self._page)) * _FLOAT.itemsize

    def _region(self, pages: int) -> mmap.mmap:
        return mmap.mmap(-1, pages * self.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _seen(self, region: mmap.mmap) -> Array:
        return np.frombuffer(region, _FLOAT).reshape(-1, *self._page)

    def _addresses(self) -> npt.NDArray[np.int64]:
        both = (self.keys, self.values)
        return np.array([[pool.ctypes.data for pool in pools] for pools in both], np.int64)

    def _resized(self, region: mmap.mmap, pages: int) -> mmap.mmap:
        try:
            region.resize(pages * self.page_bytes)
            return region
        except (BufferError, OSError, SystemError, ValueError):
            new = self._region(pages)
            kept = min(len(region), len(new))
            np.frombuffer(new, np.uint8)[:kept] = np.frombuffer(region, np.uint8)[:kept]
            return new


class PageMemory:
    """Memory of sequences that lie in pages."""

    def __init__(self, pools: NativePools, tables: Sequence[Sequence[int]]) -> None:
        """`tables` are the pages of each run's sequence."""
        self._pools, self._tables = pools, tables

    def note(
        self,
        tables: PassTables,
        runs: Sequence[TokenRun],
        spread: npt.NDArray[np.int64],
        width: int,
    ) -> None:
        """Write where all tokens go, and where the blocks of all sequences lie."""
        pools = self._pools
        pages = self._pages(runs, width)
        head_bytes = pools.keys[0].strides[2]
        rows = np.repeat(np.arange(len(runs)), [run.count for run in runs])
        block, within = np.divmod(spread, BLOCK)
        tables.targets[:, : len(spread)] = (
            pages[rows, block] * pools.page_bytes + within * head_bytes
        )
        tables.blocks[:, : pages.size] = pages.reshape(-1) * pools.page_bytes
        tables.keys[:, 0], tables.values[:, 0] = pools.addresses
        tables.strides[:, 0] = pools.keys[0].strides[1]

    def _pages(self, runs: Sequence[TokenRun], width: int) -> npt.NDArray[np.int64]:
        found = np.zeros((len(runs), width), np.int64)
        for row, (run, table) in enumerate(zip(runs, self._tables, strict=True)):
            used = -(-(run.first + run.count) // BLOCK)
            if len(table) < used:
                raise ValueError(f"{used} pages are needed and a table has {len(table)}.")
            found[row, :used] = table[:used]
        if not 0 <= found.min() <= found.max() < len(self._pools):
            raise ValueError(f"Page {found.max()} is not one of {len(self._pools)}.")
        return found


class CacheMemory:
    """Memory of one sequence, in mlx-lm's caches, [1, heads, tokens, size] each."""

    def __init__(self, cache: Sequence[KVCache], heads: int, head_size: int, count: int) -> None:
        """With room for this many more tokens."""
        for layer in cache:
            _widen(layer, heads, head_size, count)
        mx.eval([array for layer in cache for array in (layer.keys, layer.values)])
        self._layers = [(_seen(layer, "keys"), _seen(layer, "values")) for layer in cache]

    def note(
        self,
        tables: PassTables,
        runs: Sequence[TokenRun],
        spread: npt.NDArray[np.int64],
        width: int,
    ) -> None:
        """Write where all tokens go, and where the sequence's blocks lie."""
        strides = np.array([keys.strides for keys, _ in self._layers], np.int64)
        head_bytes = strides[:, 2:3]
        tables.targets[:, : len(spread)] = spread * head_bytes
        tables.blocks[:, :width] = np.arange(width) * BLOCK * head_bytes
        tables.keys[:, 0] = [keys.ctypes.data for keys, _ in self._layers]
        tables.values[:, 0] = [values.ctypes.data for _, values in self._layers]
        tables.strides[:, 0] = strides[:, 1]


def _widen(layer: KVCache, heads: int, head_size: int, count: int) -> None:
    needed = layer.offset + count
    if layer.keys is not None and layer.keys.shape[2] >= needed:
        return
    shape = (1, heads, -(-needed // _STEP) * _STEP, head_size)
    keys, values = mx.zeros(shape), mx.zeros(shape)
    if layer.keys is not None and layer.offset:
        keys[:, :, : layer.offset] = layer.keys[:, :, : layer.offset]
        values[:, :, : layer.offset] = layer.values[:, :, : layer.offset]
    layer.keys, layer.values = keys, values


def _seen(layer: Any, name: str) -> Array:
    """A cache's memory as it lies there."""
    seen = np.array(getattr(layer, name), copy=False)
    if not seen.flags.c_contiguous:
        whole = mx.contiguous(getattr(layer, name))
        mx.eval(whole)
        setattr(layer, name, whole)
        seen = np.array(whole, copy=False)
    return seen
