"""A model of mlx-lm's whose key-value memory is pages: it runs passes and gives logits.

What a model can do is found by asking it. Where all its layers page and all its attention goes through the
seam, every token is a row of one flat pass. Where some layers keep state of their own or attend in their
own way, prompts run one sequence a pass, and sequences that are being answered run as rows of another.
Where a layer's state is of a class that cannot be batched, every sequence runs by itself. Where the logits
are others than those that the model computes with caches of its own, it keeps those caches.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from millrace.paging.batching import Batching
from millrace.paging.head import choose_in
from millrace.paging.layers import PagedLayer
from millrace.paging.passes import PageGroup, PagePass, Run, run_pass
from millrace.paging.pool import TRASH
from millrace.paging.seam import SEAM
from millrace.paging.self_test import HeadShape, kernels_agree
from millrace.paging.states import StateLayer

log = logging.getLogger("millrace.models")

_TRIAL = -2
"""The sequence that models are tried with, and those below it."""
_TRIAL_PAGES = 4
_ALIKE = 0.05
"""By how much of the largest logit those of the same token may differ in rows and alone: bfloat16 differs
by a hundredth, a wrong mask by more than the logit itself."""
_OTHER = 0.1
"""By how much those of one sequence may differ on pages and in caches of the model's own: a router of
experts may choose others by a last digit."""
_PROMPT = [1, 2, 3, 1, 1, 3, 2, 2, 1, 3, 3, 2]


class PagedModel:
    def __init__(
        self,
        model: Any,
        *,
        page: int,
        pages: int = 1,
        kernels: bool = False,
        group: Any = None,
    ) -> None:
        """`page` is how many tokens a page holds, `pages` how many there are at first. With
        `kernels`, those of a GPU write and read them. `group` are the ranks that the model is split
        over: all make the same trial runs and come to the same `batching`."""
        self.model = model
        self.page = page
        self._group = group
        caches = make_prompt_cache(model)
        self.windows = _windows(caches)
        """By group of layers: how many keys a token sees; None is all."""
        self._layers = [self._layer(cache) for cache in caches]
        self._empty: dict[int, Any] = {}
        """Unused caches of layers that are neither paged nor arrays, by place."""
        self._own: dict[int, dict[int, Any]] = {}
        """By sequence, the caches of layers that are neither paged nor arrays."""
        self._choice = choose_in(model)
        SEAM.install(model)
        self.batching = Batching.SINGLE
        if self._suits_pages(pages):
            if kernels:
                self._use_kernels()
        else:
            self._keep_own_caches()

    def _use_kernels(self) -> None:
        """Have GPU kernels write and read the pages of layers for which they give what plain operations
        give."""
        tried: dict[HeadShape, bool] = {}
        for layer in self.paged:
            shape = layer.head_shape
            if shape is None:
                continue
            if shape not in tried:
                tried[shape] = kernels_agree(shape)
            if tried[shape]:
                layer.use_kernels()

    def _layer(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return [self._layer(part) for part in cache.caches]
        if type(cache) is ArraysCache:
            return StateLayer(len(cache.cache))
        if (window := _window(cache)) is not _NOT_PAGED:
            group = self.windows.index(window)
            return PagedLayer(SEAM.current, group, self.page, window)
        return cache

    @property
    def paged(self) -> list[PagedLayer]:
        return [each for each in _flat(self._layers) if isinstance(each, PagedLayer)]

    @property
    def states(self) -> list[StateLayer]:
        return [each for each in _flat(self._layers) if isinstance(each, StateLayer)]

    @property
    def _kept(self) -> list[PagedLayer | StateLayer]:
        return [*self.paged, *self.states]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._kept)

    @property
    def state(self) -> list[mx.array]:
        """All that is kept, to be waited for."""
        own = [a for caches in self._own.values() for c in caches.values() for a in arrays_of(c)]
        return [a for layer in self._kept for a in layer.state] + own

    @property
    def layers(self) -> list[Any]:
        """What stands for mlx-lm's cache of each layer."""
        return self._layers

    def page_bytes(self, group: int) -> int:
        """Bytes of a page in all layers of a group."""
        return sum(layer.page_bytes for layer in self.paged if layer.group == group)

    @property
    def state_bytes(self) -> int:
        """Bytes of what is kept of sequences beside their pages."""
        own = [cache for caches in self._own.values() for cache in caches.values()]
        kept = sum(layer.held() * layer.sequence_bytes for layer in self.states)
        return kept + sum(int(cache.nbytes) for cache in own)

    def resize(self, pages: int, group: int | None = None) -> None:
        """Have this many pages in the pools of a group or of all, a layer at a time."""
        for layer in self.paged:
            if group is None or layer.group == group:
                layer.resize(pages)
                mx.eval(layer.state)

    def copy_page(self, source: int, target: int, group: int) -> None:
        """Copy a page to another, in all layers of a group."""
        for layer in self.paged:
            if layer.group == group and layer.keys is not None:
                layer.copy(source, target)

    def drop(self, sequence: int) -> None:
        """Forget what is kept of a sequence beside its pages."""
        self._own.pop(sequence, None)
        for layer in self.states:
            layer.drop(sequence)

    def copy_state(self, source: int, target: int) -> None:
        """Give a sequence what another has beside its pages."""
        if source in self._own:
            self._own[target] = copy.deepcopy(self._own[source])
        for layer in self.states:
            if layer.has(source):
                layer.put(target, list(layer.of(source)))

    def own_cache(self, sequence: int, place: int) -> Any:
        """A copy of a sequence's cache of a layer that is neither paged nor arrays."""
        found = self._own.get(sequence, {}).get(place)
        return copy.deepcopy(found if found is not None else self._empty[place])

    def own(self, sequence: int) -> dict[int, Any]:
        """A sequence's caches of layers that are neither paged nor arrays, by place."""
        return self._own.setdefault(sequence, {})

    def run(
        self,
        tokens: mx.array,
        at: PagePass,
        sequences: Sequence[int],
        wanted: mx.array | None = None,
        **more: Any,
    ) -> mx.array:
        """Run a pass of [rows, columns] tokens; logits of the `wanted` ones, or of all, as [tokens, size].

        `sequences` name the state of each row where the model has any.
        """
        SEAM.current.running = at
        self._choice.places, self._choice.made = wanted, False
        try:
            caches = [self._lend(i, layer, at, sequences) for i, layer in enumerate(self._layers)]
            logits: mx.array = self.model(tokens, cache=caches, **more)
        finally:
            SEAM.current.running = None
            self._choice.places = None
        for layer in self.states:
            layer.take_back()
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if wanted is None or self._choice.made else logits[wanted]

    def _lend(self, place: int, layer: Any, at: PagePass, sequences: Sequence[int]) -> Any:
        """What the model gets for a layer."""
        fresh = len(at.runs) == 1 and not at.runs[0].first
        if isinstance(layer, list):
            parts = [
                self._lend(place * 64 + i, part, at, sequences) for i, part in enumerate(layer)
            ]
            return CacheList(*parts)
        if isinstance(layer, StateLayer):
            return layer.lend(sequences, fresh=fresh)
        if isinstance(layer, PagedLayer):
            return layer
        own = self._own.setdefault(sequences[0], {})
        if place not in own or fresh:
            own[place] = _again(layer)
            self._empty[place] = layer
        return own[place]

    # What the model can do.

    def _suits_pages(self, pages: int) -> bool:
        """Whether the model comes to the same logits on pages as with its own caches."""
        if self._group is not None:
            self.batching = self._agreed(self._probe(pages))
            return True
        try:
            self.batching = self._probe(pages)
            error = self._error()
        except MemoryError:
            raise
        except Exception as problem:  # whatever a model raises
            log.warning("the model cannot keep its state in pages: %s", problem)
            return False
        if error < _OTHER:
            return True
        log.warning("on pages the model's logits differ by %.0f %%", 100 * error)
        return False

    def _error(self) -> float:
        """How far the logits on pages are from those with the model's own caches."""
        *prompt, last = _PROMPT[: self.page * (_TRIAL_PAGES - 1)]
        own = make_prompt_cache(self.model)
        self.model(mx.array([prompt], mx.int32), cache=own)
        want = self.model(mx.array([[last]], mx.int32), cache=own).reshape(-1)
        table = list(range(1, _TRIAL_PAGES))
        try:
            self._try(prompt, table)
            at = run_pass(Run(0, len(prompt), 1), [[table] for _ in self.windows], self.page)
            found = self.run(mx.array([[last]], mx.int32), at, [_TRIAL])
            return _difference(found.reshape(-1), want)
        finally:
            self.drop(_TRIAL)

    def _keep_own_caches(self) -> None:
        """Keep every sequence in caches of the model's own, and run each by itself."""
        log.warning("sequences of this model run one by one")
        self.batching = Batching.SINGLE
        self._layers = make_prompt_cache(self.model)
        self.windows = []

    def _probe(self, pages: int) -> Batching:
        """See which layers attend through the seam, and whether rows may have places of their own."""
        attended = self._attended(1)
        for layer in self.paged:
            layer.gathers = layer.keys is not None and id(layer) not in attended
        if any(layer.gathers for layer in self.paged) or self.states or self._group is not None:
            # Their prompts are rows of several tokens, which some attend to in another way.
            attended &= self._attended(2)
            for layer in self.paged:
                layer.gathers = layer.keys is not None and id(layer) not in attended
        for layer in self.paged:
            layer.resize(max(_TRIAL_PAGES, pages))
        if not all(isinstance(each, (PagedLayer, StateLayer)) for each in _flat(self._layers)):
            return Batching.SINGLE
        if not self._takes_rows():
            return Batching.SINGLE
        whole = not self.states and not any(layer.gathers for layer in self.paged)
        return Batching.FLAT if whole else Batching.ROWS

    def _agreed(self, found: Batching) -> Batching:
        """What every rank of the group can do: they may have different layers."""
        if self._group is None:
            return found
        kinds = list(Batching)
        votes = mx.array([kind is found for kind in kinds], mx.int32)
        total: list[int] = mx.distributed.all_sum(votes, group=self._group).tolist()  # type: ignore[assignment]
        return [kind for kind, count in zip(kinds, total, strict=True) if count][-1]

    def _attended(self, tokens: int) -> set[int]:
        """The layers whose attention goes through the seam when a row has so many tokens."""
        for layer in self.paged:
            layer.measure = True
        found: set[int] = set()
        SEAM.attended = found
        try:
            self._try([0] * tokens, [TRASH])
        finally:
            SEAM.attended = None
            self.drop(_TRIAL)
            for layer in self.paged:
                layer.measure = False
        return found

    def _takes_rows(self) -> bool:
        """Whether rows at different places come to what each comes to by itself."""
        prompts = [[1, 2, 3], [3], [2, 1]]
        names = [_TRIAL - i for i in range(len(prompts))]
        pages = [[i + 1] for i in range(len(prompts))]
        alone: list[mx.array] = []
        try:
            for name, table, prompt in zip(names, pages, prompts, strict=True):
                alone.append(self._try([*prompt, 1], table, name)[-1])
                self._try(prompt, table, name)
            runs = [Run(i, len(prompt), 1) for i, prompt in enumerate(prompts)]
            groups = [PageGroup(self.page, pages, runs, 0) for _ in self.windows]
            tokens = mx.ones((len(prompts), 1), mx.int32)
            found = self.run(tokens, PagePass(runs, groups, len(prompts), 1), names)
            want = mx.stack(alone)
            # Ranks beside the first have no logits to compare.
            follows = self._group is not None and self._group.rank() > 0
            return _difference(found, want) < _ALIKE or follows
        except Exception:  # whatever a model raises
            return False
        finally:
            for name in names:
                self.drop(name)

    def _try(self, prompt: list[int], table: list[int], name: int = _TRIAL) -> mx.array:
        """Run the tokens of a sequence that begins with them."""
        at = run_pass(Run(0, 0, len(prompt)), [[table] for _ in self.windows], self.page)
        logits = self.run(mx.array([prompt], mx.int32), at, [name])
        mx.eval(logits, [layer.state for layer in self._kept])
        return logits


def _difference(found: mx.array, want: mx.array) -> float:
    """The largest difference of logits, as a part of the largest logit."""
    error = mx.abs(found - want).max() / mx.maximum(mx.abs(want).max(), 1e-6)
    return float(error.item())


_NOT_PAGED = -1


def _window(cache: Any) -> int | None:
    """How many keys a token of a layer sees; None is all, `_NOT_PAGED` that it has no pages."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    return _NOT_PAGED


def _windows(caches: Sequence[Any]) -> list[int | None]:
    found: list[int | None] = []
    for cache in caches:
        parts = cache.caches if type(cache) is CacheList else [cache]
        found += [w for w in map(_window, parts) if w != _NOT_PAGED]
    return list(dict.fromkeys(found))


def _flat(layers: Sequence[Any]) -> list[Any]:
    return [
        each for layer in layers for each in (_flat(layer) if isinstance(layer, list) else [layer])
    ]


def arrays_of(cache: Any) -> list[mx.array]:
    """The arrays of a cache's state."""

    def flat(value: Any) -> list[mx.array]:
        if isinstance(value, mx.array):
            return [value]
        if isinstance(value, (list, tuple)):
            return [a for each in value for a in flat(each)]
        return []

    return flat(cache.state) if not cache.empty() else []


def _again(cache: Any) -> Any:
    """An empty cache like one that has not been used."""
    return copy.deepcopy(cache)
