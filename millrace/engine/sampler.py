"""The sampler: one vectorised draw for rows with different parameters.

Every row's draw is the inverse of its cumulative distribution at one uniform number from
(seed, index). Filters (top-k, top-p, min-p) reduce to one threshold per row, below which tokens are
out. Greedy rows pay for an argmax and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millrace.engine.pivot import PivotFinder
from millrace.engine.rng import uniform
from millrace.engine.row import Row


class Sampler:
    def __init__(self, pivots: PivotFinder) -> None:
        self._pivots = pivots
        self._plan: _Plan | None = None

    def changed(self) -> None:
        """The rows of the batch are not those of the last draw."""
        self._plan = None

    def draw(self, logits: mx.array, rows: Sequence[Row]) -> mx.array:
        plan = self._plan = self._plan or _Plan(rows)
        if not plan.drawn:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        u = mx.array([uniform(rows[i].seed, rows[i].made) for i in plan.drawn])[:, None]
        some = len(plan.drawn) < len(rows)
        chosen = self._inverse(logits[plan.drawn_index] if some else logits, plan, u)
        if not some:
            return chosen
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens[plan.drawn_index] = chosen
        return tokens

    def _inverse(self, logits: mx.array, plan: _Plan, u: mx.array) -> mx.array:
        z = logits.astype(mx.float32) * plan.inverse_temperature
        weights = mx.exp(z - mx.max(z, axis=-1, keepdims=True))
        if plan.filtered:
            pivot = self._pivots.find(weights, plan.top_k, plan.top_p, plan.min_p)
            weights = mx.where(weights >= pivot, weights, 0.0)
        cdf = mx.cumsum(weights, axis=-1)
        total = cdf[:, -1:]
        # The last token with weight is the answer even if rounding puts the mark at the total.
        passed = mx.sum(cdf <= u * total, axis=-1)
        last = mx.sum(cdf < total, axis=-1)
        return mx.minimum(passed, last).astype(mx.int32)


class _Plan:
    """What a set of rows needs, worked out once per change of the batch."""

    def __init__(self, rows: Sequence[Row]) -> None:
        drawn = [i for i, r in enumerate(rows) if not _greedy(r)]
        self.drawn = drawn
        if not drawn:
            return
        params = [rows[i].sampling for i in drawn]
        self.drawn_index = mx.array(drawn, mx.int32)
        self.inverse_temperature = mx.array([1.0 / s.temperature for s in params])[:, None]
        self.top_k = [s.top_k for s in params]
        self.top_p = [s.top_p for s in params]
        self.min_p = [s.min_p for s in params]
        self.filtered = any(s.top_k or s.top_p < 1.0 or s.min_p > 0.0 for s in params)


def _greedy(row: Row) -> bool:
    return row.sampling.temperature == 0.0 or row.sampling.top_k == 1
