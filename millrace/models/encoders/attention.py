"""Attention that looks both ways, over rows of unequal length, in bounded memory.

Scores of a long text would take gigabytes where they are written out: its queries are taken in
blocks, and where a layer looks only so far, keys beyond that are not touched at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millrace.models.encoders.activations import is_hosted, softmax

SCORE_BYTES = 64 << 20
"""The most that the scores of one block may take."""


@dataclass(frozen=True)
class Reach:
    """Which keys the queries of a batch see."""

    lengths: mx.array | None
    """Tokens of each row; None if none is filled up."""
    window: int | None = None
    """How far a query sees, to either side."""

    def mask(self, queries: range, keys: range) -> mx.array | None:
        allowed: mx.array | None = None
        if self.lengths is not None:
            allowed = (
                mx.arange(keys.start, keys.stop)[None, None, None]
                < self.lengths[:, None, None, None]
            )
        if self.window is not None and not self._sees_all(queries, keys):
            apart = mx.arange(queries.start, queries.stop)[:, None] - mx.arange(
                keys.start, keys.stop
            )
            near = (mx.abs(apart) <= self.window)[None, None]
            # What fills a row up may see nothing of it: it sees itself, since nothing is no number.
            allowed = near if allowed is None else (allowed & near) | (apart == 0)
        return allowed

    def _sees_all(self, queries: range, keys: range) -> bool:
        assert self.window is not None
        furthest = max(queries.stop - 1 - keys.start, keys.stop - 1 - queries.start)
        return furthest <= self.window


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    reach: Reach,
    *,
    scale: float | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """All of (rows, heads, tokens, width); `bias` is added to the scores of (heads, tokens, tokens)."""
    rows, heads, length, width = queries.shape
    scale = width**-0.5 if scale is None else scale
    block = max(16, SCORE_BYTES // (4 * rows * heads * length))
    if block >= length:
        return _block(queries, keys, values, reach, scale, bias, range(length), range(length))
    parts: list[mx.array] = []
    for start in range(0, length, block):
        asked = range(start, min(length, start + block))
        seen = range(length)
        if reach.window is not None:
            seen = range(max(0, asked.start - reach.window), min(length, asked.stop + reach.window))
        part = _block(queries, keys, values, reach, scale, bias, asked, seen)
        # One after the other: all of them at once would take what the blocks are there to save.
        mx.eval(part)
        parts.append(part)
    return mx.concatenate(parts, axis=2)


def _block(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    reach: Reach,
    scale: float,
    bias: mx.array | None,
    asked: range,
    seen: range,
) -> mx.array:
    mask = reach.mask(asked, seen)
    if len(asked) < queries.shape[2] or len(seen) < keys.shape[2]:
        queries = queries[:, :, asked.start : asked.stop]
        keys, values = (x[:, :, seen.start : seen.stop] for x in (keys, values))
    if bias is not None:
        added = bias[None, :, asked.start : asked.stop, seen.start : seen.stop]
        if mask is not None:
            added = mx.where(mask, added, mx.array(-math.inf, added.dtype))
        mask = added.astype(queries.dtype)
    if is_hosted(queries) and mask is not None and mask.dtype == mx.bool_:
        mask = mx.where(mask, mx.array(0.0), mx.array(-math.inf))
    if is_hosted(queries):
        scores = (queries * scale) @ keys.transpose(0, 1, 3, 2)
        return softmax(scores if mask is None else scores + mask) @ values
    found: Any = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return found
