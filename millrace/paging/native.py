"""Our own CPU kernels' models on pages: what `model.py` is for those that MLX runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from millrace.paging.batching import Batching
from millrace.paging.passes import Run
from millrace.paging.table import PageCopy

if TYPE_CHECKING:
    from millrace.native.model import NativeModel


class NativePagedModel:
    """All layers share one group of pages; windows bound what attention reads, not what is held."""

    batching = Batching.FLAT
    windows: tuple[int | None, ...] = (None,)
    immediate = True

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self._pools = model.pools(1)
        self.page: int = self._pools.keys[0].shape[2]

    @property
    def state(self) -> list[mx.array]:
        return []

    def whole_layers(self, group: int) -> list[int]:
        """The layers that have pages of a group: all."""
        return list(range(len(self._pools.keys)))

    def groups_layers(self, group: int) -> int:
        """How many layers have pages of a group."""
        return len(self._pools.keys)

    def page_bytes(self, group: int) -> int:
        return 2 * self._pools.page_bytes * len(self._pools.keys)

    @property
    def state_bytes(self) -> int:
        return 0

    def resize(self, pages: int, group: int) -> None:
        self._pools.resize(pages)

    def copy_page(self, copy: PageCopy, group: int) -> None:
        for pool in (*self._pools.keys, *self._pools.values):
            pool[copy.target, :, : copy.tokens] = pool[copy.source, :, : copy.tokens]

    def copy_state(self, source: int, target: int) -> None:
        """There is none beside the pages."""

    def drop(self, sequence: int) -> None:
        """There is nothing beside the pages."""

    def run(
        self,
        tokens: mx.array,
        runs: Sequence[Run],
        tables: Sequence[Sequence[int]],
        wanted: Sequence[int],
        *,
        positions: Sequence[int] | None,
        adapters: Sequence[int],
        peek: bool = False,
    ) -> mx.array | None:
        """Logits of the wanted tokens, by their place in the pass; None if none are wanted."""
        return self.model.run_pages(
            np.array(tokens, np.int64),
            runs,
            self._pools,
            tables,
            wanted=wanted,
            positions=positions,
            adapters=adapters,
            peek=peek,
        )

    def read(
        self, layer: int, pages: Sequence[int], begin: int, end: int
    ) -> tuple[mx.array, mx.array]:
        """Copies of keys and values at the places begin … end-1 of some pages, [1, heads, tokens, size]."""
        found = []
        for pool in (self._pools.keys[layer], self._pools.values[layer]):
            rows = pool[list(pages)].transpose(1, 0, 2, 3)
            flat = rows.reshape(rows.shape[0], -1, rows.shape[3])
            found.append(mx.array(np.ascontiguousarray(flat[None, :, begin:end])))
        return found[0], found[1]

    def write(
        self, layer: int, pages: Sequence[int], begin: int, keys: mx.array, values: mx.array
    ) -> None:
        """Put keys and values, [1, heads, tokens, size], at the places from `begin` on of some pages."""
        pairs: tuple[Any, ...] = (
            (self._pools.keys[layer], keys),
            (self._pools.values[layer], values),
        )
        for pool, new in pairs:
            source = np.array(new.astype(mx.float32), copy=False)[0]
            at = np.arange(begin, begin + source.shape[1])
            page = np.asarray(pages, np.int64)[at // self.page]
            pool[page, :, at % self.page] = source.transpose(1, 0, 2)
