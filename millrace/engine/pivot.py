"""Thresholds for top-k, top-p and min-p without sorting the vocabulary on the device.

`find` takes unnormalised weights whose greatest is 1 and returns, per row, the least weight that is
kept. Ties with it are kept too, so the answer does not depend on the order of equal tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np


class PivotFinder(Protocol):
    def find(
        self,
        weights: mx.array,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> mx.array: ...

    def typical(self, weights: mx.array, share: float) -> mx.array:
        """One row's weights, without those whose surprise is far from the expected one."""


class HostPivots:
    """For the CPU device, whose arrays the host can look at without a copy."""

    def find(
        self,
        weights: mx.array,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> mx.array:
        table = np.array(weights, copy=False)
        pivots = [
            _row_pivot(row, k, p, m)
            for row, k, p, m in zip(table, top_k, top_p, min_p, strict=True)
        ]
        return mx.array(pivots, mx.float32)[:, None]

    def typical(self, weights: mx.array, share: float) -> mx.array:
        p, off = _surprise(weights)
        row, mass = np.array(off, copy=False)[0], np.array(p, copy=False)[0]
        order = np.argsort(row, kind="stable")
        cut = int(np.searchsorted(np.cumsum(mass[order], dtype=np.float64), share))
        limit = float(row[order[min(cut, row.size - 1)]])
        return mx.where(off <= limit, weights, 0.0)


def _row_pivot(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    pivot = min_p
    if 0 < top_k < row.size:
        pivot = max(pivot, float(np.partition(row, row.size - top_k)[row.size - top_k]))
    if top_p < 1.0:
        kept = row[row >= pivot] if pivot > 0.0 else row
        total = float(kept.sum(dtype=np.float64))
        # Tokens below this bound weigh at most (1 - top_p) of the total together: never needed.
        bound = (1.0 - top_p) * total / row.size
        head = np.sort(kept[kept >= bound])[::-1]
        mass = np.cumsum(head, dtype=np.float64)
        cut = min(int(np.searchsorted(mass, top_p * total)), head.size - 1)
        pivot = max(pivot, float(head[cut]))
    return pivot


class DevicePivots:
    """For GPUs: bisection on the weights, a fixed number of cheap passes and no wait for the host."""

    PASSES = 26

    def find(
        self,
        weights: mx.array,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> mx.array:
        size = weights.shape[-1]
        pivot = mx.array(list(min_p), mx.float32)[:, None]
        if any(0 < k < size for k in top_k):
            wanted = mx.array([k if 0 < k < size else size for k in top_k], mx.float32)[:, None]
            ones = mx.ones_like(weights)
            pivot = mx.maximum(pivot, self._bisect(weights, ones, wanted))
        if any(p < 1.0 for p in top_p):
            kept = mx.where(weights >= pivot, weights, 0.0)
            # A share of 1 or more keeps all; the search then settles at 0.
            share = mx.array([p if p < 1.0 else 2.0 for p in top_p], mx.float32)[:, None]
            wanted = share * mx.sum(kept, axis=-1, keepdims=True)
            pivot = mx.maximum(pivot, self._bisect(weights, kept, wanted))
        return pivot

    def typical(self, weights: mx.array, share: float) -> mx.array:
        p, off = _surprise(weights)
        low = mx.zeros((weights.shape[0], 1))
        high = mx.max(mx.where(p > 0, off, 0.0), axis=-1, keepdims=True)
        for _ in range(self.PASSES):
            middle = (low + high) * 0.5
            mass = mx.sum(mx.where(off <= middle, p, 0.0), axis=-1, keepdims=True)
            enough = mass >= share
            low, high = mx.where(enough, low, middle), mx.where(enough, middle, high)
        return mx.where(off <= high, weights, 0.0)

    def _bisect(self, weights: mx.array, mass: mx.array, wanted: mx.array) -> mx.array:
        """The greatest threshold (to float precision) that keeps at least `wanted` of the mass.

        The search runs over exponents: weights span many orders of magnitude.
        """
        low = mx.full(wanted.shape, -104.0)
        high = mx.zeros(wanted.shape)
        for _ in range(self.PASSES):
            middle = (low + high) * 0.5
            kept = mx.sum(mx.where(weights >= mx.exp(middle), mass, 0.0), axis=-1, keepdims=True)
            enough = kept >= wanted
            low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
        found = mx.exp(low)
        return mx.where(low <= -103.9, 0.0, found)


def _surprise(weights: mx.array) -> tuple[mx.array, mx.array]:
    """Probabilities, and how far each token's surprise is from the distribution's entropy."""
    p = weights / mx.sum(weights, axis=-1, keepdims=True)
    surprise = -mx.log(mx.maximum(p, 1e-38))
    entropy = mx.sum(p * surprise, axis=-1, keepdims=True)
    return p, mx.where(p > 0, mx.abs(surprise - entropy), mx.inf)
