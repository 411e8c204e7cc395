"""A pass as the layers see it: which tokens of which sequences, where they are written, what they read.

One `PagePass` is shared by all layers of a model for the duration of a pass. Host lists become device
arrays once, when a layer first asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from millrace.paging.pool import TRASH

LONG = 256
"""Tokens of a run from which on its pages are gathered for MLX's own attention: the kernels read all keys
once for every token."""
LONG_BEHIND, MANY_KEYS = 64, 1024
"""The same for runs whose last token sees many keys."""


def is_long(first: int, count: int) -> bool:
    """Whether a run's pages are gathered for its attention."""
    return count >= LONG or (count >= LONG_BEHIND and first + count >= MANY_KEYS)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence that are computed in a pass, one behind the other."""

    sequence: int
    """Its place in the pass's page tables."""
    first: int
    """Tokens of the sequence before these: where they are written, and how many keys they see."""
    count: int


@dataclass(eq=False)
class PageGroup:
    """The tables of one kind of layers: those that look equally far back have the same pages."""

    page: int
    """Tokens of a page."""
    tables: list[list[int]]
    """Page numbers by sequence and place; TRASH behind a window."""
    runs: Sequence[Run]
    padding: int

    @cached_property
    def width(self) -> int:
        """Pages of the longest table, rounded so that shapes recur."""
        longest = max(map(len, self.tables), default=0)
        return 1 << max(0, longest - 1).bit_length()

    @cached_property
    def table(self) -> mx.array:
        """[sequences + 1, width]; the last one is that of padding."""
        width = self.width
        rows = [[*t, *[TRASH] * (width - len(t))] for t in self.tables]
        return mx.array([*rows, [TRASH] * width], mx.int32)

    @cached_property
    def slots(self) -> mx.array:
        """The place in the flattened pool that each token is written to."""
        page, slots = self.page, []
        for run in self.runs:
            pages = self.tables[run.sequence]
            places = range(run.first, run.first + run.count)
            slots += [pages[n // page] * page + n % page for n in places]
        return mx.array([*slots, *[TRASH] * self.padding], mx.int32)


@dataclass(eq=False)
class PagePass:
    """The runs of a pass in the order of its tokens, and the tables of each group of layers."""

    runs: Sequence[Run]
    groups: Sequence[PageGroup]
    rows: int
    """Batch rows of the model's input; tokens lie row by row."""
    columns: int
    positions: Sequence[int] | None = None
    """Where each row's first token stands for rotary embeddings; by default, its place."""
    padding: int = 0
    """Tokens at the end that belong to no sequence."""
    _lent: dict[int, tuple[mx.array, mx.array, object]] = field(default_factory=dict)
    """Keys and values that layers have returned in place of the whole sequence's, and the layer."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def lend(self, keys: mx.array, values: mx.array, layer: object) -> None:
        """A layer returns the new keys and values to the model in place of the whole sequence's."""
        self._lent[id(keys)] = (keys, values, layer)

    def lender(self, keys: mx.array, values: mx.array) -> object | None:
        """The layer that has returned these, if one has."""
        lent = self._lent.get(id(keys))
        return lent[2] if lent is not None and lent[1] is values else None

    def lent_by(self, layer: object) -> tuple[mx.array, mx.array]:
        """What a layer has returned in this pass."""
        for keys, values, lender in self._lent.values():
            if lender is layer:
                return keys, values
        raise RuntimeError("A layer is asked for keys before it has any.")

    @cached_property
    def places(self) -> mx.array:
        """Each token's place in its sequence."""
        places = [n for run in self.runs for n in range(run.first, run.first + run.count)]
        return mx.array([*places, *[0] * self.padding], mx.int32)

    @cached_property
    def sequences(self) -> mx.array:
        """Each token's sequence; padding has one of its own behind them."""
        found = [run.sequence for run in self.runs for _ in range(run.count)]
        last = len(self.groups[0].tables) if self.groups else 0
        return mx.array([*found, *[last] * self.padding], mx.int32)

    @cached_property
    def long_runs(self) -> list[tuple[int, Run]]:
        """The runs whose pages are gathered, each with its first token's place in the pass.

        They stand behind all others, and padding behind them.
        """
        begin = 0
        long: list[tuple[int, Run]] = []
        for run in self.runs:
            if is_long(run.first, run.count):
                long.append((begin, run))
            elif long:
                raise ValueError("A short run stands behind a long one.")
            begin += run.count
        return long

    @cached_property
    def offset(self) -> mx.array | int:
        """What models pass to rotary embeddings: a place for each row of their input."""
        found = self.positions
        if found is None:
            places = [n for run in self.runs for n in range(run.first, run.first + run.count)]
            found = [*places, *[0] * self.padding][:: self.columns]
        return found[0] if self.rows == 1 else mx.array(found, mx.int32)


def flat_pass(
    runs: Sequence[Run],
    tables: Sequence[list[list[int]]],
    page: int,
    *,
    tokens: int | None = None,
    positions: Sequence[int] | None = None,
) -> PagePass:
    """A pass in which every token is a row of its own; `tables` are those of each group.

    It is padded to `tokens`, so that shapes recur.
    """
    count = sum(run.count for run in runs)
    padding = (tokens or count) - count
    groups = [PageGroup(page, t, runs, padding) for t in tables]
    if positions is not None:
        positions = [*positions, *[0] * padding]
    return PagePass(runs, groups, count + padding, 1, positions, padding)


def run_pass(run: Run, tables: Sequence[list[list[int]]], page: int) -> PagePass:
    """A pass of one run as one row."""
    groups = [PageGroup(page, t, [run], 0) for t in tables]
    return PagePass([run], groups, 1, run.count)
