"""Drawing a token by going down a tree over the vocabulary, with a number of its own for each level.

One number against the running sum of all tokens would do, too. But a sum over tens of thousands of small
weights lets the last bits of each decide: the same text computed in a chunk and token by token, which
differs in these, was seen to part once in some ten thousand draws. Down a tree, only the few shares at
hand are compared on each level, and it takes a hundred times as many draws.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millrace.engine.rng import uniform

FAN = 16
"""Branches of each place in the tree: blocks of the vocabulary, down to single tokens."""
_BRANCHES = np.arange(FAN + 1)
FIRST_LANE = 1
"""Of the numbers that are drawn for a token, that of the tree's first level."""


def depth(width: int) -> int:
    """Levels of the tree over so many tokens."""
    levels, reach = 1, FAN
    while reach < width:
        levels, reach = levels + 1, reach * FAN
    return levels


def numbers(seed: int, index: int, width: int) -> list[float]:
    """One for each level."""
    return [uniform(seed, index, FIRST_LANE + level) for level in range(depth(width))]


def drawn(
    weights: NDArray[np.float32],
    ids: NDArray[np.intp] | None,
    levels: Sequence[float],
) -> int:
    """A place among the weights, which are those of the tokens `ids`, in order, or of all."""
    span, base = FAN ** len(levels), 0
    first, last = 0, weights.size
    for number in levels:
        span //= FAN
        # Where the branches that have any token begin, and the numbers of these branches.
        if ids is None:
            starts = np.arange(first, last, span)
            branches: Sequence[int] = range(starts.size)
        else:
            edges = base + span * _BRANCHES
            cuts = first + np.searchsorted(ids[first:last], edges)
            branches = np.flatnonzero(cuts[1:] > cuts[:-1]).tolist()
            starts = cuts[branches]
        sums = np.add.reduceat(weights[first:last], starts - first, dtype=np.float64)
        mass = sums.cumsum().tolist()
        # The last branch with weight is the answer even if rounding puts the mark at the total.
        at = min(bisect_right(mass, number * mass[-1]), bisect_left(mass, mass[-1]))
        base += span * branches[at]
        first, last = int(starts[at]), int(starts[at + 1]) if at + 1 < starts.size else last
    return first


def drawn_on_device(weights: mx.array, levels: Sequence[Sequence[float]]) -> mx.array:
    """A token for each row; rows without any weight get the first."""
    sums = [weights]
    while sums[-1].shape[-1] > FAN:
        sums[-1] = _whole(sums[-1])
        sums.append(sums[-1].reshape(weights.shape[0], -1, FAN).sum(axis=-1))
    sums[-1] = _whole(sums[-1])
    at = mx.zeros((weights.shape[0], 1), mx.int32)
    branches = mx.arange(FAN, dtype=mx.int32)
    for part, number in zip(reversed(sums), mx.array(levels).T, strict=True):
        mass = mx.cumsum(mx.take_along_axis(part, FAN * at + branches, axis=-1), axis=-1)
        total = mass[:, -1:]
        # The last branch with weight is the answer even if rounding puts the mark at the total.
        passed = mx.sum(mass <= number[:, None] * total, axis=-1, keepdims=True)
        end = mx.sum(mass < total, axis=-1, keepdims=True)
        at = FAN * at + mx.minimum(passed, end).astype(mx.int32)
    return at[:, 0]


def _whole(weights: mx.array) -> mx.array:
    """With nothing behind it up to a full block."""
    width = weights.shape[-1]
    missing = FAN * math.ceil(width / FAN) - width
    return mx.pad(weights, ((0, 0), (0, missing))) if missing else weights
