"""Putting an engine together: the BLAS before MLX, the model, the sampler that fits the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.config import EngineConfig
from millrace.engine.link import Link
from millrace.models import blas
from millrace.protocol import Loading, Ready

if TYPE_CHECKING:
    from millrace.engine.loop import Engine


_LEAST_KV_MEMORY = 256 << 20


def build(config: EngineConfig, link: Link) -> Engine:
    """Load the model and say ready. Raises ModelError when it cannot be loaded."""
    # Before anything imports mlx.core: a BLAS loaded later is not used.
    blas.prepare()
    link.send(Loading("loading the model"))

    from millrace.engine.loop import Engine
    from millrace.engine.measure import cost_of
    from millrace.engine.memory import Budget
    from millrace.engine.pivot import DevicePivots, HostPivots
    from millrace.engine.sampler import Sampler
    from millrace.models.load import load

    loaded = load(config)
    pivots = HostPivots() if loaded.device == "cpu" else DevicePivots()
    spare = int(0.8 * (loaded.memory - loaded.weight_bytes))
    budget = Budget(cost_of(loaded.caches), config.kv_memory or max(_LEAST_KV_MEMORY, spare))
    engine = Engine(loaded.model, config, Sampler(pivots), budget, link)
    link.send(
        Ready(
            context=loaded.context,
            device=loaded.device,
            dtype=loaded.dtype,
            vocab_size=loaded.vocab_size,
            load_seconds=loaded.seconds,
            weight_bytes=loaded.weight_bytes,
            kv_budget=budget.limit,
            kv_bytes_per_token=budget.row(1024) // 1024,
        )
    )
    return engine
