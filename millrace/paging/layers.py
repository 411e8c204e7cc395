"""What stands in for mlx-lm's cache objects: one per layer, for all sequences.

A layer writes the keys and values of a pass into its pool. Where the model's attention goes through the
seam (`seam.py`), it hands back the new keys as a token, and the seam attends over pages. Elsewhere it
gathers each row's pages into ordinary arrays, with a mask for what is beyond a row's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millrace.paging import kernels, plain
from millrace.paging.passes import PageGroup, PagePass
from millrace.paging.rule import AttentionRule
from millrace.paging.self_test import HeadShape


class CausalMask(str):
    """The mask `causal` with the window that a model asked for: models hand it on unopened."""

    window: int | None

    def __new__(cls, window: int | None = None) -> CausalMask:
        mask = super().__new__(cls, "causal")
        mask.window = window
        return mask


@dataclass(eq=False)
class CurrentPass:
    """The pass that is being run, for the layers of one model."""

    running: PagePass | None = None

    @property
    def at(self) -> PagePass:
        if self.running is None:
            raise RuntimeError("No pass is running.")
        return self.running


class PagedLayer:
    """Keys and values of one layer."""

    def __init__(
        self, current: CurrentPass, group: int, page: int, window: int | None = None
    ) -> None:
        """`group` is whose tables it reads; `window` how many keys a token sees, itself among them."""
        self._current = current
        self.group = group
        self.page = page
        self.window = window
        self.gathers = False
        """Whether its keys are handed out whole."""
        self.measure = False
        """Whether it is only to be seen what its keys and values look like."""
        self.keys: mx.array | None = None
        """[pages × page, heads, size]"""
        self.values: mx.array | None = None
        self.chain: mx.array | None = None
        """What orders the kernels that write into the pools and read them; None where MLX's own operations
        do both."""
        self.queried: tuple[int, int | None, bool] | None = None
        """How the layer was last attended to: query heads, window, and whether there were sinks."""
        self._rules: dict[tuple[float, int | None, int], AttentionRule] = {}

    # What models ask of a cache.

    @property
    def offset(self) -> mx.array | int:
        return self._current.at.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = self._current.at
        if self.measure:
            self.allocate(1, keys, values)
        self.write(keys, values)
        if self.gathers:
            return self._gathered(at)
        at.lend(keys, values, self)
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The keys and values that the pass's tokens see, for a layer that has none of its own."""
        at = self._current.at
        return self._gathered(at) if self.gathers else at.lent_by(self)

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        if self.gathers:
            return self._mask(window_size or self.window)
        if count == 1 and (window_size is None or self.measure):
            return None
        return CausalMask(window_size)

    def size(self) -> Any:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    # Pages.

    def resize(self, pages: int) -> None:
        """Have this many pages; the contents of those that stay are kept."""
        if self.keys is None or self.values is None:
            return
        if self.chain is not None:
            mx.eval(self.chain)
        self.keys = _resized(self.keys, pages * self.page)
        self.values = _resized(self.values, pages * self.page)

    def allocate(self, pages: int, keys: mx.array, values: mx.array) -> None:
        """Make the pool for keys and values like these, shaped [rows, heads, columns, size]."""
        self.keys, self.values = (
            mx.zeros((pages * self.page, like.shape[1], like.shape[3]), like.dtype)
            for like in (keys, values)
        )

    @property
    def head_shape(self) -> HeadShape | None:
        """What GPU kernels would be used for; None where they do not take it."""
        if self.keys is None or self.values is None or self.gathers or self.queried is None:
            return None
        heads, key_size = int(self.keys.shape[1]), int(self.keys.shape[2])
        value_size = int(self.values.shape[2])
        if not kernels.fits(key_size, value_size, self.keys.dtype):
            return None
        query_heads, window, sinks = self.queried
        sizes = (heads, query_heads, key_size, value_size)
        return HeadShape(*sizes, self.keys.dtype, self.page, window, sinks)

    def use_kernels(self) -> None:
        """Have GPU kernels write and read the pools."""
        self.chain = mx.zeros((1,), mx.int32)

    def copy(self, source: int, target: int) -> None:
        """Copy a page to another."""
        begin = target * self.page
        slots = mx.arange(begin, begin + self.page, dtype=mx.int32)
        self.write_at(slots, *self.read([source], 0, self.page))

    def read(self, pages: Sequence[int], begin: int, end: int) -> tuple[mx.array, mx.array]:
        """Copies of keys and values at the places begin … end-1 of some pages, [1, heads, tokens, size]."""
        keys, values = self.paged()
        if self.chain is not None:
            keys, values = mx.depends([keys, values], [self.chain])
        index = mx.array(pages, mx.int32)
        found = []
        for pool in (keys, values):
            rows = pool[index].reshape(-1, *pool.shape[2:])[begin:end]
            found.append(mx.contiguous(rows.transpose(1, 0, 2)[None]))
        if self.chain is not None:
            # The pages may be written to next.
            (self.chain,) = mx.depends([self.chain], found)
        return found[0], found[1]

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Put the keys and values of the pass's tokens into their pages."""
        self.write_at(self._current.at.groups[self.group].slots, keys, values)

    def write_at(self, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Put keys and values, [rows, heads, columns, size], into these places of the pools."""
        assert self.keys is not None and self.values is not None
        if self.chain is None:
            self.keys[slots] = _flat(keys)
            self.values[slots] = _flat(values)
            return
        self.chain = kernels.write(self.keys, self.values, keys, values, slots, self.chain)

    def attend(
        self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of the pass's queries, [rows, heads, columns, size], over its sequences' pages."""
        assert self.keys is not None and self.values is not None
        at = self._current.at
        group = at.groups[self.group]
        rule = self._rule(scale, window or self.window, sinks)
        self.queried = queries.shape[1], rule.window, sinks is not None
        if self.chain is not None and not at.long_runs:
            out, self.chain = kernels.attend(
                queries,
                self.keys,
                self.values,
                group.table,
                at.sequences,
                at.places,
                self.page,
                rule,
                self.chain,
            )
            return out
        flat = _flat(queries)
        if self.chain is None:
            out = plain.attend(flat, *self.paged(), at, group, rule)
        else:
            out = self._attend_long(flat, at, group, rule)
        rows, _, columns, _ = queries.shape
        return out.reshape(rows, columns, *out.shape[1:]).transpose(0, 2, 1, 3)

    def _attend_long(
        self, queries: mx.array, at: PagePass, group: PageGroup, rule: AttentionRule
    ) -> mx.array:
        """The same where some runs are long: those are gathered, the kernels have the others."""
        assert self.keys is not None and self.values is not None and self.chain is not None
        parts: list[mx.array] = []
        short = at.long_runs[0][0]
        if short:
            part, self.chain = kernels.attend(
                queries[:short, :, None],
                self.keys,
                self.values,
                group.table,
                at.sequences[:short],
                at.places[:short],
                self.page,
                rule,
                self.chain,
            )
            parts.append(part[:, :, 0])
        for begin, run in at.long_runs:
            keys, values = mx.depends(list(self.paged()), [self.chain])
            some = queries[begin : begin + run.count]
            part = plain.attend_run(
                some, keys, values, group, run, rule, recurring=kernels.shapes_cost()
            )
            (self.chain,) = mx.depends([self.chain], [part])
            parts.append(part)
        if at.padding:
            parts.append(mx.zeros((at.padding, *parts[0].shape[1:]), parts[0].dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def attend_masked(
        self, queries: mx.array, scale: float, mask: mx.array, sinks: mx.array | None
    ) -> mx.array:
        """Attention of a single run over as many of its last keys as a mask of the model's own is wide."""
        at = self._current.at
        if at.rows != 1 or len(at.runs) != 1:
            raise RuntimeError("Only a run that is a pass of its own can have a mask of its own.")
        keys, values = self.paged()
        if self.chain is not None:
            keys, values = mx.depends([keys, values], [self.chain])
        rule = self._rule(scale, self.window, sinks)
        group = at.groups[self.group]
        found = plain.attend_masked(queries, keys, values, group, at.runs[0], rule, mask)
        if self.chain is not None:
            (self.chain,) = mx.depends([self.chain], [found])
        return found

    def _rule(self, scale: float, window: int | None, sinks: mx.array | None) -> AttentionRule:
        key = (scale, window, id(sinks))
        if key not in self._rules:
            self._rules[key] = AttentionRule(scale, window, sinks)
        return self._rules[key]

    def paged(self) -> tuple[mx.array, mx.array]:
        """Keys and values as [pages, page, heads, size]."""
        assert self.keys is not None and self.values is not None
        return (
            self.keys.reshape(-1, self.page, *self.keys.shape[1:]),
            self.values.reshape(-1, self.page, *self.values.shape[1:]),
        )

    @property
    def state(self) -> list[mx.array]:
        return [a for a in (self.keys, self.values, self.chain) if a is not None]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of keys and values."""
        pools = [a for a in (self.keys, self.values) if a is not None]
        return sum(self.page * int(a.nbytes) // a.shape[0] for a in pools)

    @property
    def nbytes(self) -> int:
        return sum(int(a.nbytes) for a in self.state)

    # Models whose attention is their own.

    def _gathered(self, at: PagePass) -> tuple[mx.array, mx.array]:
        """Each row's keys and values, as wide as the longest table."""
        group = at.groups[self.group]
        rows = group.table[: at.rows] if at.columns > 1 or not at.padding else group.table
        if at.columns == 1:
            rows = group.table[at.sequences]
        places = at.places.reshape(rows.shape[0], at.columns)
        key = mx.arange(rows.shape[1] * self.page, dtype=mx.int32)
        seen = key <= places.max(axis=1, keepdims=True)
        if self.window is not None:
            seen = seen & (key > places.min(axis=1, keepdims=True) - self.window)
        return tuple(  # type: ignore[return-value]
            plain.only_seen(
                pool[rows].reshape(rows.shape[0], -1, *pool.shape[2:]).transpose(0, 2, 1, 3), seen
            )
            for pool in self.paged()
        )

    def _mask(self, window: int | None) -> mx.array:
        """[rows, 1, columns, keys]: what each token sees of its gathered row."""
        at = self._current.at
        width = at.groups[self.group].width * self.page
        query = at.places.reshape(at.rows, 1, at.columns, 1)
        key = mx.arange(width, dtype=mx.int32)
        mask = key <= query
        return mask if window is None else mask & (key > query - window)


def _flat(array: mx.array) -> mx.array:
    """[rows, heads, columns, size] as [tokens, heads, size]."""
    rows, heads, columns, size = array.shape
    return array.transpose(0, 2, 1, 3).reshape(rows * columns, heads, size)


def _resized(array: mx.array, length: int) -> mx.array:
    have = array.shape[0]
    if length <= have:
        return mx.contiguous(array[:length])
    return mx.concatenate([array, mx.zeros((length - have, *array.shape[1:]), array.dtype)])
