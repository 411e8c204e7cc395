"""Sizes that are counted are the sizes of what is kept, for every kind of layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cache.plain_segments import from_caches
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from millrace.cache.planner import Layers
from millrace.cache.state import Layout, checkpoint_of, joined, sizes_of


def _run(cache: Any, steps: list[int], width: int, dtype: mx.Dtype) -> None:
    for count in steps:
        keys = mx.random.normal((1, 2, count, width)).astype(dtype)
        values = mx.random.normal((1, 2, count, 2 * width)).astype(dtype)
        cache.update_and_fetch(keys, values)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_segments_packed_or_not(pack: bool, dtype: mx.Dtype) -> None:
    caches = [KVCache(), KVCache()]
    for cache, width in zip(caches, (64, 8), strict=True):
        _run(cache, [3, 40], width, dtype)
    layout = Layout(("KVCache", "KVCache"), (0, 1), (), Layers(False))
    sizes = sizes_of(layout, caches, pack)
    parts = [from_caches(layout, caches, *span, pack) for span in ((0, 5), (5, 43))]
    for segment in (*parts, joined(parts), parts[1].cut(3, 9)):
        mx.eval(segment.arrays)
        assert segment.nbytes == sizes.segment(0, segment.length)


@pytest.mark.parametrize("steps", [[1], [5], [300], [100, 1, 1], [7] * 60, [40, 300, 3, 1]])
def test_checkpoints_at_any_place(steps: list[int]) -> None:
    def made(steps: list[int]) -> list[Any]:
        recurrent = ArraysCache(2)
        recurrent[0], recurrent[1] = mx.zeros((1, 3, 8)), mx.zeros((1, 4, 4, 4))
        both = CacheList(RotatingKVCache(max_size=64), KVCache())
        caches = [RotatingKVCache(max_size=32), ChunkedKVCache(48), both, recurrent]
        for count in steps:
            caches[1].maybe_trim_front()
            for cache in (caches[0], caches[1], *both.caches):
                _run(cache, [count], 8, mx.float32)
        return caches

    layout = Layout(("a", "b", "c", "d"), (), (0, 1, 2, 3), Layers(True))
    sizes = sizes_of(layout, made([2]), False)
    checkpoint = checkpoint_of(layout, made(steps))
    assert checkpoint.nbytes == sizes.checkpoint(sum(steps))
