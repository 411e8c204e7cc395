"""Drawing tokens from logits: filters, then a way down a tree over what they leave (`descent.py`).

Both backends take the logits of all rows and mean the same. Ties with a filter's threshold are
kept, so a draw does not depend on the order of equal tokens. Whatever the logits are, a row gets a
token of the vocabulary: where they are no distribution (all -inf, or inf or NaN among them), argmax.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millrace.engine.ahead import Ahead
from millrace.engine.descent import drawn, drawn_on_device, numbers
from millrace.engine.rng import uniform
from millrace.engine.row import Row
from millrace.protocol import Sampling

XTC_LANE = 0
GREEDY_BELOW = 1e-5
"""A temperature under this is none: float32 could not tell its draws from the greatest logit."""
Weights = NDArray[np.float32]
Ids = NDArray[np.intp]


class SamplingBackend(Protocol):
    def choose(self, logits: mx.array, rows: Sequence[Row | Ahead]) -> mx.array:
        """One token per row."""


def greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


class HostSampling:
    """For the CPU device, whose arrays the host can look at without a copy.

    The device has nothing to do until the tokens are there, so its cores are the host's meanwhile.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1))

    def choose(self, logits: mx.array, rows: Sequence[Row | Ahead]) -> mx.array:
        table = np.array(logits.astype(mx.float32), copy=False)
        sampled = [i for i, r in enumerate(rows) if not greedy(r.sampling)]
        tokens = table.argmax(axis=-1).tolist() if len(sampled) < len(rows) else [0] * len(rows)
        if len(sampled) > 1:
            found = list(self._threads.map(lambda i: _draw(table[i], rows[i]), sampled))
        else:
            found = [_draw(table[i], rows[i]) for i in sampled]
        for i, token in zip(sampled, found, strict=True):
            tokens[i] = token
        return mx.array(tokens, mx.int32)


def _draw(logits: Weights, row: Row | Ahead) -> int:
    if not np.isfinite(logits.max()):
        return int(logits.argmax())
    ids, kept = candidates(logits, row.sampling)
    if _coin(row):
        ends = np.array(_ends(row, logits.size), np.intp)
        kept = without_top_choices(kept, row.sampling.xtc_threshold, _places(ids, ends))
    at = drawn(kept, ids, numbers(row.seed, row.generated, logits.size))
    return at if ids is None else int(ids[at])


def candidates(logits: Weights, sampling: Sampling) -> tuple[Ids | None, Weights]:
    """The tokens that the filters leave and their weights, the greatest about 1; no ids means all."""
    top = float(logits.max())
    ids: Ids | None = None
    floor = -math.inf
    if 0 < sampling.top_k < logits.size:
        place = logits.size - sampling.top_k
        floor = float(np.partition(logits, place)[place])
    if sampling.min_p > 0.0:
        floor = max(floor, top + math.log(sampling.min_p) * sampling.temperature)
    if floor > -math.inf:
        ids = np.flatnonzero(logits >= np.float32(floor))
        logits = logits[ids]
    weights: Weights = np.exp((logits - np.float32(top)) * np.float32(1.0 / sampling.temperature))
    if sampling.top_p < 1.0:
        inside = np.flatnonzero(weights >= nucleus(weights, sampling.top_p))
        ids = inside if ids is None else ids[inside]
        weights = weights[inside]
    if sampling.typical_p < 1.0:
        weights = typical(weights, sampling.typical_p)
    return ids, weights


def nucleus(weights: Weights, share: float) -> float:
    """The least weight of the smallest set of tokens that has the share of the total."""
    total = float(weights.sum(dtype=np.float64))
    # Tokens below this bound weigh at most (1 - share) of the total together: never needed.
    bound = (1.0 - share) * total / weights.size
    head = np.sort(weights[weights >= np.float32(bound)])[::-1]
    mass = np.cumsum(head, dtype=np.float64)
    return float(head[min(int(np.searchsorted(mass, share * total)), head.size - 1)])


def typical(weights: Weights, share: float) -> Weights:
    """The weights without those whose surprise is far from the expected one."""
    p = weights / float(weights.sum(dtype=np.float64))
    surprise = -np.log(np.maximum(p, np.float32(1e-38)))
    off = np.abs(surprise - float((p * surprise).sum(dtype=np.float64)))
    # Only the tokens of one narrow bucket need an order: the one in which the share is reached.
    bucket = np.minimum(off * 64, 4095).astype(np.int32)
    mass = np.cumsum(np.bincount(bucket, weights=p, minlength=4096))
    if share >= mass[-1]:  # which rounding may leave below 1
        return weights
    cut = min(int(np.searchsorted(mass, share)), 4095)
    inside = off[bucket == cut]
    order = np.argsort(inside, kind="stable")
    before = mass[cut - 1] if cut else 0.0
    within = before + np.cumsum(p[bucket == cut][order])
    limit = inside[order[min(int(np.searchsorted(within, share)), len(order) - 1)]]
    return np.where(off <= limit, weights, np.float32(0.0))


def without_top_choices(weights: Weights, least_share: float, spared: Ids) -> Weights:
    """XTC: of the tokens above the threshold only the least likely stays, and what ends the row."""
    above = (weights > 0) & (weights >= least_share * weights.sum(dtype=np.float64))
    if above.sum() < 2:
        return weights
    kept = np.where(above & (weights > weights[above].min()), np.float32(0.0), weights)
    kept[spared] = weights[spared]
    return kept


def _coin(row: Row | Ahead) -> bool:
    chance = row.sampling.xtc_probability
    return chance > 0.0 and uniform(row.seed, row.generated, XTC_LANE) < chance


def _ends(row: Row | Ahead, width: int) -> list[int]:
    """The row's stop tokens, in order, as far as there are logits for them."""
    return sorted(t for t in row.stop_ids if 0 <= t < width)


def _places(ids: Ids | None, tokens: Ids) -> Ids:
    """Where these tokens stand among the kept ones."""
    if ids is None:
        return tokens
    at = np.minimum(np.searchsorted(ids, tokens), ids.size - 1)
    found: Ids = at[ids[at] == tokens]
    return found


class DeviceSampling:
    """For GPUs: one vectorised draw for all rows, and no wait for the host."""

    def choose(self, logits: mx.array, rows: Sequence[Row | Ahead]) -> mx.array:
        sampled = [i for i, r in enumerate(rows) if not greedy(r.sampling)]
        if not sampled:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        if len(sampled) == len(rows):
            return self._draw(logits, rows)
        at = mx.array(sampled, mx.int32)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens[at] = self._draw(logits[at], [rows[i] for i in sampled])
        return tokens

    def _draw(self, logits: mx.array, rows: Sequence[Row | Ahead]) -> mx.array:
        cooling = mx.array([1.0 / r.sampling.temperature for r in rows])[:, None]
        weights = mx.softmax(logits.astype(mx.float32) * cooling, axis=-1)
        params = [r.sampling for r in rows]
        filtered = [i for i, s in enumerate(params) if s.top_k or s.top_p < 1.0 or s.min_p > 0.0]
        if filtered:
            part = weights if len(filtered) == len(rows) else weights[mx.array(filtered)]
            part = _filtered(part, [params[i] for i in filtered])
            if len(filtered) == len(rows):
                weights = part
            else:
                weights[mx.array(filtered)] = part
        for i, row in enumerate(rows):
            if row.sampling.typical_p < 1.0:
                weights[i : i + 1] = _typical(weights[i : i + 1], row.sampling.typical_p)
            if _coin(row):
                weights[i : i + 1] = _xtc(weights[i : i + 1], row)
        width = weights.shape[-1]
        found = drawn_on_device(weights, [numbers(r.seed, r.generated, width) for r in rows])
        some = mx.max(weights, axis=-1) > 0
        return mx.where(some, found, mx.argmax(logits, axis=-1).astype(mx.int32))


def _filtered(weights: mx.array, params: list[Sampling]) -> mx.array:
    size = weights.shape[-1]
    counts = [s.top_k if 0 < s.top_k < size else size for s in params]
    pivot = mx.array([s.min_p for s in params])[:, None] * mx.max(weights, axis=-1, keepdims=True)
    nucleus = min(s.top_p for s in params) < 1.0
    if min(counts) < size or nucleus:
        falling = mx.sort(weights, axis=-1)[:, ::-1]
        kth = mx.take_along_axis(falling, mx.array(counts, mx.int32)[:, None] - 1, axis=-1)
        pivot = mx.maximum(pivot, kth)
        if nucleus:
            mass = mx.cumsum(mx.where(falling >= pivot, falling, 0.0), axis=-1)
            share = mx.array([s.top_p for s in params])[:, None]
            cut = mx.sum(mass < share * mass[:, -1:], axis=-1, keepdims=True)
            last = mx.take_along_axis(falling, mx.minimum(cut, size - 1), axis=-1)
            pivot = mx.where(share < 1.0, mx.maximum(pivot, last), pivot)
    return mx.where(weights >= pivot, weights, 0.0)


def _typical(weights: mx.array, share: float) -> mx.array:
    p = weights / mx.sum(weights, axis=-1, keepdims=True)
    surprise = -mx.log(mx.maximum(p, 1e-38))
    entropy = mx.sum(p * surprise, axis=-1, keepdims=True)
    off = mx.where(p > 0, mx.abs(surprise - entropy), mx.inf)
    order = mx.argsort(off, axis=-1)
    mass = mx.cumsum(mx.take_along_axis(p, order, axis=-1), axis=-1)
    cut = mx.minimum(mx.sum(mass < share, axis=-1, keepdims=True), weights.shape[-1] - 1)
    limit = mx.take_along_axis(off, mx.take_along_axis(order, cut, axis=-1), axis=-1)
    return mx.where(off <= limit, weights, 0.0)


def _xtc(weights: mx.array, row: Row | Ahead) -> mx.array:
    threshold = row.sampling.xtc_threshold * mx.sum(weights, axis=-1, keepdims=True)
    above = (weights > 0) & (weights >= threshold)
    least = mx.min(mx.where(above, weights, mx.inf), axis=-1, keepdims=True)
    kept = mx.where(above & (weights > least), 0.0, weights)
    if found := _ends(row, weights.shape[-1]):
        ends: Any = mx.array([found], mx.int32)
        kept[mx.array([[0]], mx.int32), ends] = mx.take_along_axis(weights, ends, axis=-1)
    return kept
