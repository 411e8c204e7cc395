"""Models that MLX runs, as the engine runs them: runs of sequences in, logits of chosen tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from millrace.models.adapters.slots import AdapterSlots
from millrace.paging.batching import Batching
from millrace.paging.layers import PagedLayer
from millrace.paging.model import PagedModel
from millrace.paging.passes import Run, flat_pass, run_pass
from millrace.paging.pool import TRASH
from millrace.paging.states import StateLayer
from millrace.paging.table import PageCopy

PAGE = 32
"""Tokens of a page: on average half of one is empty for each sequence; a table of 256 reaches 8,192."""

Tables = Sequence[list[list[int]]]
"""Pages by group of layers, run and place."""


class MlxPagedModel:
    immediate = False

    def __init__(
        self,
        model: Any,
        adapters: AdapterSlots,
        *,
        kernels: bool = False,
        padded: Callable[[int], int] = lambda count: count,
        group: Any = None,
    ) -> None:
        """`padded` says how many tokens a pass of some tokens has, so that shapes recur; `group` are
        the ranks that the model is split over."""
        self._paged = PagedModel(model, page=PAGE, kernels=kernels, group=group)
        self._adapters = adapters
        self._padded = padded
        self.page = PAGE
        self.windows: Sequence[int | None] = tuple(self._paged.windows)
        self.batching = self._paged.batching
        self._sees: bool = getattr(model, "sees", False)
        self._own_positions: bool = bool(getattr(getattr(model, "family", None), "grids", False))

    @property
    def state(self) -> list[mx.array]:
        """All that passes have written, to be waited for."""
        return self._paged.state

    def page_bytes(self, group: int) -> int:
        return self._paged.page_bytes(group)

    @property
    def state_bytes(self) -> int:
        return self._paged.state_bytes

    def resize(self, pages: int, group: int) -> None:
        self._paged.resize(pages, group)

    def copy_page(self, copy: PageCopy, group: int) -> None:
        self._paged.copy_page(copy.source, copy.target, group)

    def copy_state(self, source: int, target: int) -> None:
        self._paged.copy_state(source, target)

    def drop(self, sequence: int) -> None:
        self._paged.drop(sequence)

    def run(
        self,
        tokens: mx.array,
        runs: Sequence[Run],
        tables: Tables,
        wanted: Sequence[int],
        *,
        names: Sequence[int],
        positions: Sequence[int] | None,
        adapters: Sequence[int],
        vision: Any = None,
        shifts: Sequence[int] | None = None,
    ) -> mx.array | None:
        """Logits of the wanted tokens, by their place in the pass; None if none are wanted.

        `names` are the runs' sequences, `positions` where each token stands if not at its place, `shifts`
        by how much each run's positions are beyond its places, `vision` what a prompt with pictures is
        run with.
        """
        count = tokens.shape[0]
        places = [*wanted] or [0]
        total = self._padded(count) if self.batching is Batching.FLAT and vision is None else count
        flat = len(runs) > 1 or count == 1 or total != count or positions is not None
        places += [0] * (self._padded(len(places)) - len(places))
        more: dict[str, Any] = {}
        if flat:
            if self.batching is not Batching.FLAT and positions is not None and count > len(runs):
                raise ValueError("The model takes no positions.")
            slots = [
                slot for slot, run in zip(adapters, runs, strict=True) for _ in range(run.count)
            ]
            at = flat_pass(runs, tables, self.page, tokens=total, positions=positions)
            inputs = mx.pad(tokens, (0, total - count))[:, None]
            self._adapters.use([*slots, *[0] * (total - count)], places)
            if shifts is not None:
                each = [s for s, run in zip(shifts, runs, strict=True) for _ in range(run.count)]
                more["deltas"] = mx.array([*each, *[0] * (total - count)], mx.int32)
        else:
            at = run_pass(runs[0], tables, self.page)
            inputs = tokens[None]
            self._adapters.use(adapters, places)
            if shifts is not None:
                more["deltas"] = mx.array(shifts, mx.int32)
        if vision is not None:
            more["vision_input"] = vision
        logits = self._paged.run(inputs, at, names, mx.array(places, mx.int32), **more)
        return logits[: len(wanted)] if wanted else None

    # The prefix cache's view of a sequence: mlx-lm's cache objects.

    def read(
        self, layer: int, pages: Sequence[int], begin: int, end: int
    ) -> tuple[mx.array, mx.array]:
        """Copies of keys and values at the places begin … end-1 of some pages, [1, heads, tokens, size]."""
        found: tuple[mx.array, mx.array] = self._paged.layers[layer].read(pages, begin, end)
        return found

    def read_own(
        self, sequence: int, layer: int, begin: int, end: int
    ) -> tuple[mx.array, mx.array]:
        """Copies of keys and values of a layer that keeps them in a cache of the model's own."""
        own = self._paged.own(sequence)[layer]
        keys, values = (mx.contiguous(a[:, :, begin:end]) for a in (own.keys, own.values))
        return keys, values

    def write(
        self, layer: int, pages: Sequence[int], begin: int, keys: mx.array, values: mx.array
    ) -> None:
        """Put keys and values, [1, heads, tokens, size], at the places from `begin` on of some pages."""
        page = self.page
        places = range(begin, begin + keys.shape[2])
        slots = [pages[n // page] * page + n % page for n in places]
        self._paged.layers[layer].write_at(mx.array(slots, mx.int32), keys, values)

    def whole_layers(self, group: int) -> list[int]:
        """The layers, by place, that have pages of a group and nothing else."""
        return [
            place
            for place, layer in enumerate(self._paged.layers)
            if isinstance(layer, PagedLayer) and layer.group == group and layer.keys is not None
        ]

    def groups_layers(self, group: int) -> int:
        """How many layers, and parts of layers, have pages of a group."""
        return sum(layer.group == group and layer.keys is not None for layer in self._paged.paged)

    def cache(self, layer: int, tables: Tables, length: int, sequence: int) -> Any:
        """A layer's state of a sequence after `length` tokens as one of mlx-lm's caches; a copy."""
        return self._cache(self._paged.layers[layer], layer, tables, length, sequence)

    def _cache(self, layer: Any, place: int, tables: Tables, length: int, sequence: int) -> Any:
        if isinstance(layer, list):
            parts = (
                self._cache(part, place * 64 + i, tables, length, sequence)
                for i, part in enumerate(layer)
            )
            return CacheList(*parts)
        if isinstance(layer, StateLayer):
            arrays = ArraysCache(layer.size)
            if layer.has(sequence):
                arrays.cache = [None if a is None else mx.contiguous(a) for a in layer.of(sequence)]
            return arrays
        if not isinstance(layer, PagedLayer):
            return self._paged.own_cache(sequence, place)
        pages = tables[layer.group][0]
        if layer.window is None:
            whole = KVCache()
            if length and layer.keys is not None:
                whole.keys, whole.values = layer.read(pages[: -(-length // self.page)], 0, length)
                whole.offset = length
            return whole
        rotating = RotatingKVCache(max_size=layer.window, keep=0)
        if length:
            begin = max(0, length - layer.window)
            first = begin // self.page
            some = pages[first : -(-length // self.page)]
            shift = first * self.page
            rotating.keys, rotating.values = layer.read(some, begin - shift, length - shift)
            rotating.offset, rotating._idx = length, length - begin
        return rotating

    def adopt(self, caches: Sequence[Any], tables: Tables, sequence: int) -> None:
        """Give a sequence, whose tables have room for it, the state that mlx-lm's caches hold."""
        for place, (layer, cache) in enumerate(zip(self._paged.layers, caches, strict=True)):
            self._adopt(layer, place, cache, tables, sequence)

    def _adopt(self, layer: Any, place: int, cache: Any, tables: Tables, sequence: int) -> None:
        if isinstance(layer, list):
            for i, (part, inner) in enumerate(zip(layer, cache.caches, strict=True)):
                self._adopt(part, place * 64 + i, inner, tables, sequence)
        elif isinstance(layer, StateLayer):
            layer.put(sequence, list(cache.cache))
        elif not isinstance(layer, PagedLayer):
            self._paged.own(sequence)[place] = cache
        elif cache.keys is not None and cache.offset:
            keys, values = cache.keys, cache.values
            if isinstance(cache, RotatingKVCache):
                keys, values = (cache._temporal_order(a) for a in (keys, values))
            count = min(cache.offset, keys.shape[2])
            begin = cache.offset - count
            pages = tables[layer.group][0]
            slots = [
                pages[n // self.page] * self.page + n % self.page
                for n in range(begin, cache.offset)
            ]
            # Behind a window, pages may have been given up already.
            kept = [i for i, slot in enumerate(slots) if slot >= (TRASH + 1) * self.page]
            first = kept[0] if kept else count
            layer.write_at(
                mx.array(slots[first:], mx.int32),
                keys[:, :, first:count],
                values[:, :, first:count],
            )
