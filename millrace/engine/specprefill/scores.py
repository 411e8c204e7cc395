"""How much of each of a prompt's tokens a draft looks at while it goes on writing."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

POOL = 13
"""Tokens over which a token's share is averaged: words are looked at by their neighbours, too."""


def attention(queries: mx.array, keys: mx.array) -> mx.array:
    """What a token looks for, shaped (heads, size) and scaled, among keys (fewer heads, tokens, size):
    the largest share that each of them gets in any head, once it is averaged with its neighbours."""
    heads, _, size = keys.shape
    asked = queries.reshape(heads, -1, size).astype(mx.float32)
    scores = asked @ keys.astype(mx.float32).swapaxes(1, 2)
    return pooled(mx.softmax(scores, axis=-1)).max(axis=(0, 1))


def pooled(shares: mx.array) -> mx.array:
    """Averages over the last axis; at its ends, over those that there are."""
    half = POOL // 2
    count = shares.shape[-1]
    wide = mx.pad(shares, [(0, 0)] * (shares.ndim - 1) + [(half, half)])
    two = wide[..., :-1] + wide[..., 1:]
    four = two[..., :-2] + two[..., 2:]
    eight = four[..., :-4] + four[..., 4:]
    total = eight[..., :count] + four[..., 8 : 8 + count] + wide[..., 12 : 12 + count]
    places = mx.arange(count)
    within = mx.minimum(places, half) + mx.minimum(count - 1 - places, half) + 1
    return total / within.astype(mx.float32)


def importance(asked: Sequence[tuple[mx.array, mx.array]]) -> mx.array:
    """The largest share in any layer, from the queries and keys of each."""
    found = attention(*asked[0])
    for queries, keys in asked[1:]:
        found = mx.maximum(found, attention(queries, keys))
    return found
