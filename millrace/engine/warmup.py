"""Warm-up: run every kind of step once before the engine says ready.

GPU kernels are compiled at their first use, which takes a minute for a quantised model on CUDA; no
request should be the one to wait for it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from millrace.cache.state import Layout, checkpoint_of, from_caches, restore
from millrace.engine.batch import Batch
from millrace.engine.row import Row
from millrace.engine.sampler import Sampler
from millrace.engine.sampling import DeviceSampling
from millrace.protocol import Choice, Sampling, Submit


def warm_up(model: Any, rows: int, chunk: int) -> None:
    """Prompts of several lengths, batches of several sizes, rows of equal and unequal length."""
    sizes = sorted({n for n in (1, 2, 8, 32, 64, rows) if n <= rows})
    batch = Batch(model, Sampler(DeviceSampling()))
    for turn, size in enumerate(sizes):
        length = min(chunk, 17 + 16 * turn)
        caches = make_prompt_cache(model)
        mx.eval(model(mx.zeros((1, length), mx.int32), cache=caches))
        for sampling in (Sampling(temperature=0.0), Sampling(1.0, top_p=0.9, top_k=40)):
            wanted = size - len(batch) if sampling.temperature == 0.0 else 0
            request = Submit(0, [0] * (length + 1), [], 4, sampling)
            new = [Row.of(request, Choice(i, i), 0.0) for i in range(wanted)]
            if new:
                batch.join(new, caches, 0)
            for _ in range(2):
                batch.forward()
                batch.sample()
                list(batch.in_flight().read())
    layout = Layout.of(model)
    for length in (chunk, chunk // 2):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.zeros((1, length), mx.int32), cache=caches))
        _keep_and_find(model, layout, caches, length)
    batch.drop(set(range(len(batch))))
    mx.clear_cache()


def _keep_and_find(model: Any, layout: Layout, caches: list[Any], length: int) -> None:
    """The copies that the prefix cache makes."""
    half = length // 2
    parts = [from_caches(layout, caches, a, b, False) for a, b in ((0, half), (half, length))]
    mx.eval([part.arrays for part in parts])
    checkpoint = checkpoint_of(layout, caches) if layout.rest else None
    found = restore(model, layout, length, parts, checkpoint, length)
    mx.eval([c.state for c in found])
