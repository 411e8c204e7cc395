"""Sequences in pages of a native model, for tests: each goes by its number, and grows by runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from native_models import Array

from millrace.native.attention import BLOCK
from millrace.native.items import NativeRun
from millrace.native.model import NativeModel
from millrace.paging.pool import PagePool
from millrace.paging.table import PageTable


class PagedSequences:
    def __init__(self, model: NativeModel, pages: int = 64) -> None:
        self.model = model
        self.pool = PagePool(pages)
        self.pools = model.pools(pages)
        self.tables: dict[int, PageTable] = {}
        for memory in (*self.pools.keys, *self.pools.values):
            memory[:] = np.nan

    def length(self, number: int) -> int:
        return self.tables[number].length if number in self.tables else 0

    def run(
        self, runs: Mapping[int, Sequence[int]], adapters: Sequence[int] = ()
    ) -> dict[int, Array]:
        """Run these tokens behind those that each sequence has: the logits of all of them."""
        tokens: list[int] = []
        places = []
        for number, some in runs.items():
            table = self.tables.setdefault(number, PageTable(self.pool, BLOCK))
            places.append(NativeRun(table.length, len(some)))
            table.extend(len(some))
            tokens += some
        pages = [self.tables[number].pages for number in runs]
        found = self.model.run_pages(
            tokens, places, self.pools, pages, wanted=range(len(tokens)), adapters=adapters
        )
        ends = np.cumsum([run.count for run in places])[:-1]
        return dict(zip(runs, np.split(np.array(found), ends), strict=True))

    def prefill(self, number: int, tokens: Sequence[int]) -> None:
        """Run tokens of which nobody wants logits."""
        table = self.tables.setdefault(number, PageTable(self.pool, BLOCK))
        run = NativeRun(table.length, len(tokens))
        table.extend(len(tokens))
        assert (
            self.model.run_pages(list(tokens), [run], self.pools, [table.pages], wanted=[]) is None
        )

    def cut(self, number: int, length: int) -> None:
        assert self.tables[number].cut(length) is None
