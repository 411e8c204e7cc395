"""The batch: rows that decode together, and the one step that moves them all.

A step has two launches. `forward` runs the model on every row's last token; while the device works,
the host reads the tokens of the step before; `sample` then draws the next ones. Nothing here decides
who may run: that is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millrace.engine.row import Ahead, Row
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
        self._guesses: list[Sequence[int]] = []
        """What the draw in flight was given beside each row's last token."""

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

    @property
    def guessing(self) -> bool:
        """Whether what is in flight says how far the rows have come: it must be read first."""
        return bool(self._guesses)

    @property
    def sliding(self) -> bool:
        """Whether every layer can take back tokens that turn out wrong."""
        return all(isinstance(c, SlotKVCache) for c in self._caches)

    def in_flight(self) -> PendingDraws:
        """The draws that the host has not read; stays good when rows join or leave."""
        draw, self._draw = self._draw, None
        return PendingDraws(list(self.rows), draw)

    def forward(self, guesses: Sequence[Sequence[int]] = ()) -> None:
        """Launch the model on every row's last token, and on what is guessed to follow it."""
        assert self._last is not None
        ahead = max(map(len, guesses), default=0)
        self._positions.begin(1 + ahead)
        inputs = self._last[:, None]
        if ahead:
            padded = [[*g, *[0] * (ahead - len(g))] for g in guesses]
            inputs = mx.concatenate([inputs, mx.array(padded, mx.int32)], axis=1)
        logits = self._model(inputs, cache=self._caches)
        if ahead:
            self._guesses = list(guesses)
            places = [(i, k) for i, g in enumerate(guesses) for k in range(len(g) + 1)]
            row, place = (mx.array(part, mx.int32) for part in zip(*places, strict=True))
            self._logits = logits[row, place]
        else:
            self._logits = logits[:, -1, :]
            self._positions.end()
        mx.async_eval(self._logits)

    def sample(self) -> None:
        """Launch the draw of every row's next token, or of one more than it has guesses."""
        assert self._logits is not None
        if self._guesses:
            wide: list[Row | Ahead] = []
            for row, guess in zip(self.rows, self._guesses, strict=True):
                wide += [row, *(Ahead(row, k + 1) for k in range(len(guess)))]
            self._draw = self._sampler.draw_ahead(self._logits, wide)
        else:
            self._draw = self._sampler.draw(self._logits, self.rows)
            self._last = self._draw.tokens
        self._logits = None
        mx.async_eval(self._draw.arrays())
        for row in self.rows:
            row.in_flight = True

    def settle(self) -> list[Settled]:
        """Read a draw with guesses: the tokens that hold, row by row."""
        draw, guesses = self._draw, self._guesses
        assert draw is not None
        drawn: list[int] = draw.tokens.tolist()
        scores = draw.scores()
        self._draw, self._guesses = None, []
        settled: list[Settled] = []
        at = 0
        for row, guess in zip(self.rows, guesses, strict=True):
            tokens = drawn[at : at + len(guess) + 1]
            right = 0
            while right < len(guess) and guess[right] == tokens[right]:
                right += 1
            settled.append(Settled(row, tokens[: right + 1], len(guess), scores.get(at)))
            at += len(guess) + 1
        self._positions.end([len(s.tokens) for s in settled])
        self._last = mx.array([s.tokens[-1] for s in settled], mx.int32)
        return settled


class Settled(NamedTuple):
    """What a row made in a step with guesses."""

    row: Row
    tokens: list[int]
    guessed: int
    logprob: TokenLogprob | None
    """Of the first token, for rows that ask: those guess nothing."""


class PendingDraws:
    """Tokens drawn on the device, with the rows they belong to."""

    def __init__(self, rows: list[Row], draw: Draw | None) -> None:
        self._rows = rows
        self._draw = draw

    def read(self) -> Iterator[tuple[Row, int, TokenLogprob | None]]:
        """Wait for the draws; rows that are gone meanwhile want none."""
        if self._draw is None:
            return
        tokens: list[int] = self._draw.tokens.tolist()
        asked = self._draw.scores()
        for i, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if not row.gone:
                yield row, token, asked.get(i)


def _empty_like(cache: Any, positions: Positions) -> Any:
    """Where a layer's batched state goes; None is filled by the first row's own `merge`."""
    return SlotKVCache(positions) if type(cache) is KVCache else None
