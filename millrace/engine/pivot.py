"""Thresholds for top-k, top-p and min-p: one number per row, below which tokens are out.

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
    """For GPUs: one sort on the device and no wait for the host."""

    def find(
        self,
        weights: mx.array,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> mx.array:
        size = weights.shape[-1]
        pivot = mx.array(list(min_p), mx.float32)[:, None]
        counts = [k if 0 < k < size else size for k in top_k]
        if min(counts) == size and min(top_p) >= 1.0:
            return pivot
        falling = mx.sort(weights, axis=-1)[:, ::-1]
        kth = mx.take_along_axis(falling, mx.array(counts, mx.int32)[:, None] - 1, axis=-1)
        pivot = mx.maximum(pivot, kth)
        if min(top_p) >= 1.0:
            return pivot
        mass = mx.cumsum(mx.where(falling >= pivot, falling, 0.0), axis=-1)
        share = mx.array(list(top_p), mx.float32)[:, None]
        cut = mx.sum(mass < share * mass[:, -1:], axis=-1, keepdims=True)
        last = mx.take_along_axis(falling, mx.minimum(cut, size - 1), axis=-1)
        return mx.where(share < 1.0, mx.maximum(pivot, last), pivot)

    def typical(self, weights: mx.array, share: float) -> mx.array:
        p, off = _surprise(weights)
        order = mx.argsort(off, axis=-1)
        mass = mx.cumsum(mx.take_along_axis(p, order, axis=-1), axis=-1)
        cut = mx.minimum(mx.sum(mass < share, axis=-1, keepdims=True), weights.shape[-1] - 1)
        limit = mx.take_along_axis(off, mx.take_along_axis(order, cut, axis=-1), axis=-1)
        return mx.where(off <= limit, weights, 0.0)


def _surprise(weights: mx.array) -> tuple[mx.array, mx.array]:
    """Probabilities, and how far each token's surprise is from the distribution's entropy."""
    p = weights / mx.sum(weights, axis=-1, keepdims=True)
    surprise = -mx.log(mx.maximum(p, 1e-38))
    entropy = mx.sum(p * surprise, axis=-1, keepdims=True)
    return p, mx.where(p > 0, mx.abs(surprise - entropy), mx.inf)
