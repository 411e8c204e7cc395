"""From the states of a text's tokens to one vector: sentence-transformers' ways of pooling."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millrace.models.encoders.facts import Pooling


def pool(
    states: mx.array, lengths: Sequence[int], ways: Sequence[Pooling], skips: Sequence[int]
) -> mx.array:
    """(rows, tokens, width) to (rows, width), in float32; of each row the first `skips` do not count."""
    states = states.astype(mx.float32)
    ends, starts = mx.array(lengths)[:, None, None], mx.array(skips)[:, None, None]
    place = mx.arange(states.shape[1])[None, :, None]
    counted = mx.logical_and(place < ends, place >= starts)
    return mx.concatenate([_pooled(states, way, counted, lengths, skips) for way in ways], axis=-1)


def _pooled(
    states: mx.array,
    way: Pooling,
    counted: mx.array,
    lengths: Sequence[int],
    skips: Sequence[int],
) -> mx.array:
    # What stands behind a row's end may be anything, also no number: it is left out, not multiplied.
    kept = mx.where(counted, states, 0.0)
    count = mx.array([float(n - s) for n, s in zip(lengths, skips, strict=True)])[:, None]
    if way == "cls":
        return states[:, 0]
    if way == "lasttoken":
        last = mx.array([n - 1 for n in lengths])[:, None, None]
        return mx.take_along_axis(states, last, axis=1)[:, 0]
    if way == "max":
        return mx.where(counted, states, -mx.inf).max(axis=1)
    if way == "mean":
        return kept.sum(axis=1) / count
    if way == "mean_sqrt_len":
        return kept.sum(axis=1) / mx.sqrt(count)
    weight = mx.where(counted, mx.arange(1, states.shape[1] + 1)[None, :, None], 0)
    return (kept * weight).sum(axis=1) / weight.sum(axis=1)
