"""The one place that touches the model: it runs passes over sequences and gives logits.

A sequence is a page table and what the model keeps of it beside pages; it goes by its number. What runs in
a pass is decided elsewhere. Memory is taken page by page, and pools grow with what is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import KVCache, make_prompt_cache

from millrace.cache.segments import CopiedSegments, Segments
from millrace.cache.sizes import StateSizes
from millrace.cache.state import Layout, RestoredState, StateCheckpoint, checkpoint_of
from millrace.engine.measure import cost_of
from millrace.engine.memory import StateCost
from millrace.engine.page_segments import PageSegments
from millrace.engine.shapes import Shapes
from millrace.models.adapters.slots import slots_of
from millrace.models.load import WARM_UP_TOKENS
from millrace.models.rotations import Rotations, asked
from millrace.paging.batching import Batching
from millrace.paging.mlx_model import MlxPagedModel
from millrace.paging.passes import Run, is_long
from millrace.paging.pool import PagePool
from millrace.paging.table import PageTable

if TYPE_CHECKING:
    from millrace.paging.native import NativePagedModel

_GROWTH = 1.5
"""How many times as many pages pools get when they are full: each growth copies what they hold."""
_FIRST_PAGES = 64
"""Pages that a pool begins with: a few short sequences need no growth."""


@dataclass(frozen=True)
class SequenceRun:
    """Tokens of one sequence in a pass, behind those that it has."""

    sequence: int
    count: int
    drafts: int = 0
    """Of its tokens, how many at its end may be cut."""
    positions: Sequence[int] | None = None
    """Where they stand, if not behind those that the sequence has."""
    vision: Any = None
    """What a part of a prompt with pictures is run with: such a run is a pass of its own."""


@dataclass(eq=False)
class _Held:
    """A sequence's memory."""

    tables: list[PageTable]
    length: int = 0
    """Tokens that it has."""
    adapter: int = 0
    shift: int = 0
    """By how much positions are beyond places, since pictures stand before them or tokens were left out."""


class Runner:
    def __init__(
        self,
        model: Any,
        used: list[Any] | None = None,
        *,
        recurring: bool = False,
        group: Any = None,
    ) -> None:
        """`used` are caches that a prompt has run on; without them, some tokens are run here. With
        `recurring`, a device of its own runs passes of recurring shapes. `group` are the ranks that a
        model is split over."""
        self._model = model
        self._rotations: Rotations | None = getattr(model, "rotations", None)
        if used is None:
            used = make_prompt_cache(model)
            mx.eval(model(mx.array([[0] * WARM_UP_TOKENS], mx.int32), cache=used))
        self.adapters = slots_of(model)
        self.layout = Layout.of(model, used)
        self.shapes = Shapes(recurring)
        self._native: NativePagedModel | None = None
        self._mlx: MlxPagedModel | None = None
        if getattr(model, "in_place", False):
            # Its compiler is not there on every platform.
            from millrace.paging.native import NativePagedModel

            self._native = NativePagedModel(model)
        else:
            self._mlx = MlxPagedModel(
                model,
                self.adapters,
                kernels=recurring and _gpu(),
                padded=self.shapes.tokens,
                group=group,
            )
        paged = self._native or self._mlx
        assert paged is not None
        self._paged: NativePagedModel | MlxPagedModel = paged
        self.cost: StateCost = replace(cost_of(used), page=paged.page)
        if not paged.windows:
            # Caches of the model's own, which grow by this many tokens from wherever they end.
            step = KVCache.step
            flat = self.cost.flat + self.cost.per_token * step
            self.cost = replace(self.cost, page=step, flat=flat)
        self._pools = [PagePool(1) for _ in paged.windows]
        self._sequences: dict[int, _Held] = {}
        self.limit = 1 << 62
        """Bytes that pools are not made larger than ahead of need."""

    @property
    def model(self) -> Any:
        return self._model

    @property
    def immediate(self) -> bool:
        """Whether a pass has been computed when its launch returns."""
        return self._paged.immediate

    @property
    def flat(self) -> bool:
        """Whether all tokens of all sequences may run in one pass."""
        return self._paged.batching is Batching.FLAT

    @property
    def single(self) -> bool:
        """Whether every sequence is a pass by itself."""
        return self._paged.batching is Batching.SINGLE

    # Sequences

    def make_caches(self) -> list[Any]:
        """Empty caches of a single sequence, of mlx-lm's classes."""
        caches: list[Any] = make_prompt_cache(self._model)
        return caches

    def __contains__(self, number: int) -> bool:
        return number in self._sequences

    def begin(self, number: int, adapter: int = 0, shift: int = 0) -> None:
        self.drop(number)
        pairs = zip(self._pools, self._paged.windows, strict=True)
        tables = [PageTable(pool, self._paged.page, window) for pool, window in pairs]
        self._sequences[number] = _Held(tables, 0, adapter, shift)

    def adopt(self, number: int, state: RestoredState, length: int) -> None:
        """Give a sequence that has begun the state of its first tokens. Pages are shared: only a last one
        that is partly filled is copied."""
        found = self._sequences[number]
        shared = None if state.pages is None else self.group_of_whole
        lacks = [
            int(length % self._paged.page > 0) if group == shared else table.lacks(length)
            for group, table in enumerate(found.tables)
        ]
        self._reserve_pages(lacks)
        for group, table in enumerate(found.tables):
            if group != shared:
                table.extend(length)
            elif (copy := table.adopt(state.pages or [], length)) is not None:
                self._paged.copy_page(copy, group)
        found.length = length
        tables = [[table.pages] for table in found.tables]
        if self._mlx is not None:
            self._mlx.adopt(state.caches, tables, number)
        elif shared is None:
            assert self._native is not None
            for layer, cache in enumerate(state.caches):
                keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
                self._native.write(layer, tables[0][0], 0, keys, values)
        for table in found.tables:
            table.pass_window()
        self._launch()

    def fork(self, number: int, copies: Sequence[int], shift: int = 0) -> None:
        """Sequences that go on from another's state; the first of them takes its place."""
        if number not in self._sequences:
            self.begin(number)
        first, *others = copies
        found = self._sequences.pop(number)
        found.shift = shift
        for copy in others:
            self._reserve_pages([1] * len(self._pools))
            pairs = [table.fork() for table in found.tables]
            self._sequences[copy] = _Held([t for t, _ in pairs], found.length, found.adapter, shift)
            for group, (_, page) in enumerate(pairs):
                if page is not None:
                    self._paged.copy_page(page, group)
            self._paged.copy_state(number, copy)
        self._sequences[first] = found
        if first != number:
            self._paged.copy_state(number, first)
            self._paged.drop(number)

    def set_adapter(self, number: int, adapter: int) -> None:
        self._sequences[number].adapter = adapter

    def drop(self, number: int) -> None:
        found = self._sequences.pop(number, None)
        if found is not None:
            for table in found.tables:
                table.release()
            self._paged.drop(number)

    def cut(self, number: int, length: int) -> None:
        """Keep the first tokens: those behind were wrong draft tokens, or of a failed pass."""
        found = self._sequences[number]
        found.length = length
        self._cut(found, length)

    def _cut(self, found: _Held, length: int) -> None:
        self._reserve_pages([table.copies_at(length) for table in found.tables])
        for group, table in enumerate(found.tables):
            if table.length > length and (copy := table.cut(length)) is not None:
                self._paged.copy_page(copy, group)

    def length(self, number: int) -> int:
        found = self._sequences.get(number)
        return 0 if found is None else found.length

    def is_long(self, number: int, count: int) -> bool:
        """Whether a run of this many more tokens must stand behind shorter ones in a pass."""
        return is_long(self.length(number), count)

    @property
    def nbytes(self) -> int:
        """Bytes of the state that sequences hold, with what the prefix cache holds as well."""
        pages = sum(
            pool.running * self._paged.page_bytes(group) for group, pool in enumerate(self._pools)
        )
        return pages + self._paged.state_bytes

    # Passes

    def run(
        self,
        tokens: mx.array,
        runs: Sequence[SequenceRun],
        wanted: Sequence[int],
        *,
        peek: bool = False,
    ) -> mx.array | None:
        """Launch a pass of these runs' tokens, one run behind the other; logits of the `wanted` ones, by
        their place in it. Where it raises, nothing of it counts.

        Long runs stand behind all others. One with `vision` is alone in its pass.
        """
        parts = [self._sequences[run.sequence] for run in runs]
        before = [part.length for part in parts]
        done: list[_Held] = []
        try:
            for part, run in zip(parts, runs, strict=True):
                done.append(part)
                self._extend(part, run.count)
            logits = self._run(tokens, runs, parts, before, wanted, peek)
        except BaseException:
            for part, length in zip(done, before, strict=False):
                part.length = length
                self._cut(part, length)
            raise
        for part, run in zip(parts, runs, strict=True):
            for table in part.tables:
                table.pass_window(run.drafts)
        if logits is None:
            self._launch()
        return logits

    def _run(
        self,
        tokens: mx.array,
        runs: Sequence[SequenceRun],
        parts: Sequence[_Held],
        before: Sequence[int],
        wanted: Sequence[int],
        peek: bool,
    ) -> mx.array | None:
        adapters = [part.adapter for part in parts]
        places = [
            Run(i, length, run.count)
            for i, (length, run) in enumerate(zip(before, runs, strict=True))
        ]
        tables = [[part.tables[group].pages for part in parts] for group in range(len(self._pools))]
        if self._native is not None:
            positions = _positions(runs, parts, before)
            if adapters and not any(adapters):
                adapters = []
            return self._native.run(
                tokens, places, tables[0], wanted, positions=positions, adapters=adapters, peek=peek
            )
        assert self._mlx is not None
        sees = getattr(self._model, "sees", False)
        shifts = [part.shift for part in parts] if sees and any(p.shift for p in parts) else None
        return self._mlx.run(
            tokens,
            places,
            tables,
            wanted,
            names=[run.sequence for run in runs],
            positions=None if sees else _positions(runs, parts, before),
            adapters=adapters,
            vision=runs[0].vision,
            shifts=shifts if runs[0].vision is None else None,
        )

    def peek(self, number: int, token: mx.array) -> tuple[mx.array, list[mx.array | None]]:
        """Run one token behind a sequence: its logits, and what it looks for, layer by layer."""
        run = [SequenceRun(number, 1)]
        if self._native is not None:
            logits = self.run(token.reshape(1), run, [0], peek=True)
            assert logits is not None
            return logits, self._native.model.queries()
        assert self._rotations is not None
        with self._rotations.watched() as seen:
            logits = self.run(token.reshape(1), run, [0])
        assert logits is not None
        return logits, asked(self._model, seen)

    def keys(self, number: int, layer: int, count: int) -> mx.array:
        """The first keys of a sequence in a layer that looks at all, shaped (heads, tokens, size)."""
        return self._read(number, layer, 0, count)[0][0]

    def wait(self) -> None:
        """Wait for all that has been launched."""
        if self._mlx is not None:
            mx.eval(self._mlx.state)

    def _launch(self) -> None:
        if self._mlx is not None:
            mx.async_eval(self._mlx.state)

    # Pages

    def _extend(self, found: _Held, count: int) -> None:
        self._reserve_pages([table.lacks(count) for table in found.tables])
        for table in found.tables:
            table.extend(count)
        found.length += count

    def _reserve_pages(self, lacks: Sequence[int]) -> None:
        """Have this many free pages in the pool of each group."""
        for group, (pool, count) in enumerate(zip(self._pools, lacks, strict=True)):
            if count <= pool.free:
                continue
            needed = len(pool) + count - pool.free
            room = (self.limit - self._allocated) // max(1, self._paged.page_bytes(group))
            grown = max(int(_GROWTH * len(pool)), _FIRST_PAGES)
            size = max(needed, min(grown, len(pool) + room))
            self._paged.resize(size, group)
            pool.grow(size)

    @property
    def _allocated(self) -> int:
        """Bytes of all pools."""
        return sum(len(p) * self._paged.page_bytes(group) for group, p in enumerate(self._pools))

    # The prefix cache's view

    def _read(self, number: int, layer: int, begin: int, end: int) -> tuple[mx.array, mx.array]:
        if None not in self._paged.windows:
            assert self._mlx is not None
            return self._mlx.read_own(number, layer, begin, end)
        page = self._paged.page
        table = self._sequences[number].tables[self.group_of_whole]
        first = begin // page
        pages = table.pages[first : -(-end // page)]
        return self._paged.read(layer, pages, begin - first * page, end - first * page)

    @property
    def group_of_whole(self) -> int:
        """The group of the layers that look at all keys."""
        return list(self._paged.windows).index(None)

    @property
    def shares(self) -> bool:
        """Whether the prefix cache can have the pages in which sequences run: those of the layers that look
        at all keys, where these are whole layers that can be cut."""
        if None not in self._paged.windows:
            return False
        group = self.group_of_whole
        layers = self._paged.whole_layers(group)
        return layers == list(self.layout.cuttable) and len(layers) == self._paged.groups_layers(
            group
        )

    @property
    def lends(self) -> bool:
        """Whether a page that one sequence or prefix gives back serves any other: all state lies in pages
        of one pool."""
        return self.shares and len(self._pools) == 1 and not self.layout.rest

    def segments(self, *, pack: bool) -> Segments[Any]:
        """How the prefix cache keeps segments: as pages of this runner where it can."""
        if pack or not self.shares:
            return CopiedSegments(pack=pack)
        group = self.group_of_whole

        def reserve(count: int) -> None:
            self._reserve_pages([count if n == group else 0 for n in range(len(self._pools))])

        return PageSegments(self._paged, self.layout, self._pools[group], group, reserve)

    def sizes(self, measured: StateSizes, *, pack: bool) -> StateSizes:
        """What such segments take, where each token takes what was measured."""
        shared = not pack and self.shares
        return msgspec.structs.replace(measured, page=self._paged.page if shared else 1)

    def state_of(self, number: int) -> SequenceState:
        """A sequence's state, for the prefix cache to keep."""
        return SequenceState(self, number)


class SequenceState:
    """The state of a sequence as the prefix cache keeps it."""

    def __init__(self, runner: Runner, number: int) -> None:
        self._runner = runner
        self._number = number

    def pairs(self, start: int, end: int) -> list[tuple[mx.array, mx.array]]:
        """Copies of the keys and values of the tokens start … end-1."""
        runner = self._runner
        return [runner._read(self._number, i, start, end) for i in runner.layout.cuttable]

    def pages(self, start: int, end: int) -> list[int]:
        """The pages of these tokens, which one more node of the prefix cache has from now on."""
        runner = self._runner
        table = runner._sequences[self._number].tables[runner.group_of_whole]
        return table.keep(start, end)

    def checkpoint(self) -> StateCheckpoint:
        """The layers that cannot be cut, as they are now."""
        runner, found = self._runner, self._runner._sequences[self._number]
        assert runner._mlx is not None
        tables = [[table.pages] for table in found.tables]
        caches = {
            i: runner._mlx.cache(i, tables, found.length, self._number) for i in runner.layout.rest
        }
        return checkpoint_of(runner.layout, caches)


def _positions(
    runs: Sequence[SequenceRun], parts: Sequence[_Held], before: Sequence[int]
) -> list[int] | None:
    """Where the tokens of a pass stand; None if all are at their places."""
    if not any(part.shift for part in parts) and all(run.positions is None for run in runs):
        return None
    found: list[int] = []
    for run, part, first in zip(runs, parts, before, strict=True):
        begin = first + part.shift
        found += range(begin, begin + run.count) if run.positions is None else run.positions
    return found


def _gpu() -> bool:
    return bool(mx.default_device() != mx.cpu)
