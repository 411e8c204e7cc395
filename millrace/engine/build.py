"""Putting an engine together: the BLAS before MLX, the model, the sampler that fits the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.config import EngineConfig
from millrace.engine.link import Link
from millrace.models import blas
from millrace.protocol import Loading, Ready

if TYPE_CHECKING:
    from millrace.engine.loop import Engine


_LEAST_KV_MEMORY = 256 << 20
CPU_CHUNK, GPU_CHUNK = 512, 2048
"""The most prompt tokens of a chunk, where the configuration does not say."""


def build(config: EngineConfig, link: Link) -> Engine:
    """Load the model and say ready. Raises ModelError when it cannot be loaded."""
    # Before anything imports mlx.core: a BLAS loaded later is not used.
    blas.prepare()
    link.send(Loading("loading the model"))

    from millrace.engine.choice import Chooser, DeviceChooser, HostChooser
    from millrace.engine.guide import Guides
    from millrace.engine.loop import Engine
    from millrace.engine.measure import cost_of
    from millrace.engine.memory import Budget
    from millrace.engine.sampler import Sampler
    from millrace.engine.warmup import warm_up
    from millrace.models.load import load

    loaded = load(config)
    chooser: Chooser = HostChooser() if loaded.device == "cpu" else DeviceChooser()
    spare = int(0.8 * (loaded.memory - loaded.weight_bytes))
    budget = Budget(cost_of(loaded.caches), config.kv_memory or max(_LEAST_KV_MEMORY, spare))
    guides = Guides(Path(config.model), loaded.vocab_size)
    if loaded.device != "cpu":
        link.send(Loading("compiling kernels"))
        warm_up(loaded.model, min(config.max_running, 64), config.prefill_chunk or GPU_CHUNK)
    chunk = config.prefill_chunk or (CPU_CHUNK if loaded.device == "cpu" else GPU_CHUNK)
    config = msgspec.structs.replace(config, prefill_chunk=chunk)
    engine = Engine(loaded.model, config, Sampler(chooser), budget, link, guides)
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
