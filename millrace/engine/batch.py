"""The batch: rows that decode together, and the one step that moves them all.

A step has two launches. `forward` runs the model on every row's last token; while the device works,
the host reads the tokens of the step before; `sample` then draws the next ones. Nothing here decides
who may run: that is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millrace.engine.row import Row
from millrace.engine.sampler import Draw, Sampler
from millrace.engine.slots import Positions, SlotKVCache
from millrace.protocol import TokenLogprob


class Batch:
    def __init__(self, model: Any, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler
        self.rows: list[Row] = []
        self._positions = Positions()
        self._caches: list[Any] = []
        self._last: mx.array | None = None
        """Each row's last token, not yet run; on the device, perhaps still being computed."""
        self._logits: mx.array | None = None
        self._draw: Draw | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self._caches)

    def join(self, rows: Sequence[Row], caches: list[Any], token: int) -> None:
        """Add rows that share one prefilled cache; `token` is the last of the prompt, not yet run."""
        first, count = len(self.rows), len(rows)
        length = rows[0].length - 1
        if not self._caches:
            self._caches = [_empty_like(c, self._positions) for c in caches]
        for i, (mine, theirs) in enumerate(zip(self._caches, caches, strict=True)):
            if isinstance(mine, SlotKVCache):
                mine.join(first, theirs, count)
            else:
                merged = theirs.merge([theirs] * count)
                if mine is None:
                    self._caches[i] = merged
                else:
                    mine.extend(merged)
        self._positions.lens += [length] * count
        self.rows += rows
        joined = mx.array([token] * count, mx.int32)
        self._last = joined if self._last is None else mx.concatenate([self._last, joined])
        self._sampler.changed()

    def drop(self, gone: set[int]) -> None:
        """Remove rows by index. The last rows move into the holes, so that few rows are copied."""
        if not gone:
            return
        keep = len(self.rows) - len(gone)
        if keep == 0:
            self.rows, self._caches, self._last = [], [], None
            self._positions.lens = []
            self._sampler.changed()
            return
        order = list(range(keep))
        movers = iter([i for i in range(keep, len(self.rows)) if i not in gone])
        for hole in (i for i in range(keep) if i in gone):
            order[hole] = next(movers)
        lens = self._positions.lens
        index = mx.array(order, mx.int32)
        for cache in self._caches:
            if isinstance(cache, SlotKVCache):
                for target, source in enumerate(order):
                    if target != source:
                        cache.move(source, target, lens[source])
            else:
                cache.filter(index)
        self._positions.lens = [lens[i] for i in order]
        self.rows = [self.rows[i] for i in order]
        assert self._last is not None
        self._last = self._last[index]
        self._sampler.changed()

    def length(self, index: int) -> int:
        """Tokens whose state a row holds."""
        return self._positions.lens[index]

    def views(self, index: int) -> list[Any]:
        """One row's keys and values where a layer keeps them in slots; nothing is copied."""
        return [
            c.view(index, self._positions.lens[index]) if isinstance(c, SlotKVCache) else None
            for c in self._caches
        ]

    def extract(self, index: int, layers: Iterable[int]) -> dict[int, Any]:
        """One row's state in layers that keep none in slots."""
        return {i: self._caches[i].extract(index) for i in layers}

    def in_flight(self) -> InFlight:
        """The draws that the host has not read; stays good when rows join or leave."""
        draw, self._draw = self._draw, None
        return InFlight(list(self.rows), draw)

    def forward(self) -> None:
        """Launch the model on every row's last token."""
        assert self._last is not None
        self._positions.begin()
        self._logits = self._model(self._last[:, None], cache=self._caches)[:, -1, :]
        self._positions.end()
        mx.async_eval(self._logits)

    def sample(self) -> None:
        """Launch the draw of every row's next token."""
        assert self._logits is not None
        self._draw = self._sampler.draw(self._logits, self.rows)
        self._last = self._draw.tokens
        self._logits = None
        mx.async_eval(self._draw.arrays())
        for row in self.rows:
            row.in_flight = True


class InFlight:
    """Tokens drawn on the device, with the rows they belong to."""

    def __init__(self, rows: list[Row], draw: Draw | None) -> None:
        self._rows = rows
        self._draw = draw

    def read(self) -> Iterator[tuple[Row, int, TokenLogprob | None]]:
        """Wait for the draws; rows that are gone meanwhile want none."""
        if self._draw is None:
            return
        tokens: list[int] = self._draw.tokens.tolist()
        plan, logprobs = self._draw.plan, self._draw.logprobs
        asked = dict(zip(plan.asked, logprobs.read(plan.tops), strict=True)) if logprobs else {}
        for i, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if not row.gone:
                yield row, token, asked.get(i)


def _empty_like(cache: Any, positions: Positions) -> Any:
    """Where a layer's batched state goes; None is filled by the first row's own `merge`."""
    return SlotKVCache(positions) if type(cache) is KVCache else None
