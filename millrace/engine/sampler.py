"""The sampler: one vectorised draw for rows with different parameters.

Every row's draw is the inverse of its cumulative distribution at one uniform number from
(seed, index). Filters (top-k, top-p, min-p) reduce to one threshold per row, below which tokens are
out. Greedy rows pay for an argmax and nothing more, and a feature costs only the rows that use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millrace.engine.edits import stack
from millrace.engine.guide import masked
from millrace.engine.logprobs import Logprobs
from millrace.engine.pivot import PivotFinder
from millrace.engine.rng import uniform
from millrace.engine.row import Row

_XTC_LANE = 1


class Draw:
    """The tokens of a step, on the device, with what some rows wanted to know about them."""

    def __init__(self, tokens: mx.array, logprobs: Logprobs | None, plan: _Plan) -> None:
        self.tokens = tokens
        self.logprobs = logprobs
        self.plan = plan

    def arrays(self) -> list[mx.array]:
        return [self.tokens] + (self.logprobs.arrays() if self.logprobs else [])


class Sampler:
    def __init__(self, pivots: PivotFinder) -> None:
        self._pivots = pivots
        self._plan: _Plan | None = None

    def changed(self) -> None:
        """The rows of the batch are not those of the last draw."""
        self._plan = None

    def draw(self, logits: mx.array, rows: Sequence[Row]) -> Draw:
        plan = self._plan = self._plan or _Plan(rows)
        asked = logits[plan.asked_index] if plan.asked else None
        logits = _edited(logits, [(i, rows[i]) for i in plan.edited])
        logits = masked(logits, [(i, g) for i in plan.guided if (g := rows[i].guide)])
        tokens = self._tokens(logits, plan, rows)
        for i in plan.thinking:
            if rows[i].forced:
                tokens[i] = rows[i].forced.pop(0)
        logprobs = None
        if asked is not None:
            logprobs = Logprobs(asked, tokens[plan.asked_index], max(plan.tops))
        return Draw(tokens, logprobs, plan)

    def _tokens(self, logits: mx.array, plan: _Plan, rows: Sequence[Row]) -> mx.array:
        if not plan.drawn:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        some = len(plan.drawn) < len(rows)
        chosen = self._inverse(
            logits[plan.drawn_index] if some else logits, plan, [rows[i] for i in plan.drawn]
        )
        if not some:
            return chosen
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens[plan.drawn_index] = chosen
        return tokens

    def _inverse(self, logits: mx.array, plan: _Plan, rows: list[Row]) -> mx.array:
        z = logits.astype(mx.float32) * plan.inverse_temperature
        weights = mx.exp(z - mx.max(z, axis=-1, keepdims=True))
        if plan.filtered:
            weights = self._filter(weights, plan)
        for i in plan.typical:
            cut = self._pivots.typical(weights[i : i + 1], rows[i].sampling.typical_p)
            weights[i : i + 1] = cut
        for i in plan.xtc:
            if uniform(rows[i].seed, rows[i].made, _XTC_LANE) < rows[i].sampling.xtc_probability:
                weights[i : i + 1] = _without_top_choices(weights[i : i + 1], rows[i])
        cdf = mx.cumsum(weights, axis=-1)
        total = cdf[:, -1:]
        u = mx.array([uniform(r.seed, r.made) for r in rows])[:, None]
        # The last token with weight is the answer even if rounding puts the mark at the total.
        passed = mx.sum(cdf <= u * total, axis=-1)
        last = mx.sum(cdf < total, axis=-1)
        return mx.minimum(passed, last).astype(mx.int32)

    def _filter(self, weights: mx.array, plan: _Plan) -> mx.array:
        some = len(plan.filtered) < weights.shape[0]
        part = weights[plan.filtered_index] if some else weights
        pivot = self._pivots.find(part, plan.top_k, plan.top_p, plan.min_p)
        part = mx.where(part >= pivot, part, 0.0)
        if not some:
            return part
        weights[plan.filtered_index] = part
        return weights


class _Plan:
    """What a set of rows needs, worked out once per change of the batch."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.edited = [i for i, r in enumerate(rows) if r.edits is not None]
        self.guided = [i for i, r in enumerate(rows) if r.guide is not None]
        self.thinking = [i for i, r in enumerate(rows) if r.thought is not None]
        self.asked = [i for i, r in enumerate(rows) if r.request.logprobs is not None]
        self.tops = [rows[i].request.logprobs or 0 for i in self.asked]
        self.asked_index = mx.array(self.asked, mx.int32)
        self.drawn = [i for i, r in enumerate(rows) if not _greedy(r)]
        if not self.drawn:
            return
        params = [rows[i].sampling for i in self.drawn]
        self.drawn_index = mx.array(self.drawn, mx.int32)
        self.inverse_temperature = mx.array([1.0 / s.temperature for s in params])[:, None]
        self.filtered = [
            i for i, s in enumerate(params) if s.top_k or s.top_p < 1.0 or s.min_p > 0.0
        ]
        self.filtered_index = mx.array(self.filtered, mx.int32)
        self.top_k = [params[i].top_k for i in self.filtered]
        self.top_p = [params[i].top_p for i in self.filtered]
        self.min_p = [params[i].min_p for i in self.filtered]
        self.typical = [i for i, s in enumerate(params) if s.typical_p < 1.0]
        self.xtc = [i for i, s in enumerate(params) if s.xtc_probability > 0.0]


def _greedy(row: Row) -> bool:
    return row.sampling.temperature == 0.0 or row.sampling.top_k == 1


def _edited(logits: mx.array, rows: list[tuple[int, Row]]) -> mx.array:
    tables = [(i, r.edits.table(r.made)) for i, r in rows if r.edits and r.edits.active(r.made)]
    if not tables:
        return logits
    at = mx.array([i for i, _ in tables], mx.int32)[:, None]
    ids, factor, shift = map(mx.array, stack([t for _, t in tables]))
    old = logits[at, ids].astype(mx.float32)
    new = mx.where(old > 0, old / factor, old * factor) + shift
    logits[at, ids] = new.astype(logits.dtype)
    return logits


def _without_top_choices(weights: mx.array, row: Row) -> mx.array:
    """XTC: of the tokens above the threshold only the least likely stays, and what ends the row."""
    above = weights >= row.sampling.xtc_threshold * mx.sum(weights, axis=-1, keepdims=True)
    least = mx.min(mx.where(above, weights, mx.inf), axis=-1, keepdims=True)
    kept = mx.where(above & (weights > least), 0.0, weights)
    if row.stop_ids:
        ends = mx.array([sorted(row.stop_ids)], mx.int32)
        kept[mx.array([[0]], mx.int32), ends] = mx.take_along_axis(weights, ends, axis=-1)
    return kept
