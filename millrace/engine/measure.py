"""Measuring a model's state: one short run, and each layer's cache says what it holds."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from millrace.engine.memory import StateCost


def cost_of(caches: list[Any]) -> StateCost:
    """From the caches of a prompt that has been run."""
    per_token, flat = 0, 0
    windowed: list[tuple[int, int]] = []
    for cache in _leaves(caches):
        if isinstance(cache, KVCache | RotatingKVCache) and cache.keys is None:
            continue  # a layer without attention
        if isinstance(cache, RotatingKVCache):
            windowed.append((cache.nbytes // cache.keys.shape[2], cache.max_size))
        elif isinstance(cache, KVCache):
            per_token += cache.nbytes // cache.keys.shape[2]
        elif isinstance(cache, ArraysCache):
            flat += cache.nbytes
        else:
            per_token += cache.nbytes
    return StateCost(per_token, tuple(windowed), flat)


def _leaves(caches: list[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        found += _leaves(list(cache.caches)) if isinstance(cache, CacheList) else [cache]
    return found
