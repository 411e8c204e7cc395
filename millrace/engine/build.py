"""Putting an engine together: the BLAS before MLX, the model, the sampler that fits the device."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.config import EngineConfig, home
from millrace.engine.transport import Transport
from millrace.flight import FlightRecorder
from millrace.models import blas
from millrace.protocol import Loading, Ready

if TYPE_CHECKING:
    from millrace.cache.disk import DiskTier
    from millrace.cache.state import Layout
    from millrace.engine.loop import Engine

log = logging.getLogger("millrace.engine")

_LEAST_KV_MEMORY = 256 << 20
_LEAST_CACHE = 64 << 20
CACHE_SHARE = 0.3
"""The part of the memory for state that the prefix cache takes, where nobody says."""
CPU_CHUNK, GPU_CHUNK = 512, 2048
"""The most prompt tokens of a chunk, where the configuration does not say."""
CPU_BURST = 20.0
"""Chunks between the steps of running rows read all the weights once more, which a CPU feels: a burst
is better run before anybody is answered."""
MOST_LANES = 8
"""With more cores than that, BLAS has more use for them than pieces of a chunk have."""
CPU_AHEAD = 8
"""The most tokens guessed ahead there."""


def build(
    config: EngineConfig, transport: Transport, recorder: FlightRecorder | None = None
) -> Engine:
    """Load the model and say ready. Raises ModelError when it cannot be loaded."""
    # Before anything imports mlx.core: a BLAS loaded later is not used.
    blas.prepare()
    transport.send(Loading("loading the model"))

    from millrace.cache.prefix import PrefixCache
    from millrace.cache.state import Layout
    from millrace.engine.cache_use import CacheUse
    from millrace.engine.cpu_pipeline import CpuPipeline
    from millrace.engine.grammar import Grammars
    from millrace.engine.loop import Engine
    from millrace.engine.measure import cost_of
    from millrace.engine.memory import Budget
    from millrace.engine.prefill import whole
    from millrace.engine.sampler import Sampler
    from millrace.engine.sampling import DeviceSampling, HostSampling, SamplingBackend
    from millrace.engine.warmup import warm_up
    from millrace.models.load import load

    loaded = load(config)
    backend: SamplingBackend = HostSampling() if loaded.device == "cpu" else DeviceSampling()
    spare = int(0.8 * (loaded.memory - loaded.weight_bytes))
    cached = config.cache_memory or max(_LEAST_CACHE, int(CACHE_SHARE * spare))
    rest = spare - cached if config.cache else spare
    budget = Budget(cost_of(loaded.caches), config.kv_memory or max(_LEAST_KV_MEMORY, rest))
    grammars = Grammars(Path(config.model), loaded.vocab_size)
    if loaded.device != "cpu":
        transport.send(Loading("compiling kernels"))
        warm_up(loaded.model, min(config.max_running, 64), config.prefill_chunk or GPU_CHUNK)
    chunk = config.prefill_chunk or (CPU_CHUNK if loaded.device == "cpu" else GPU_CHUNK)
    ahead = config.speculate
    if ahead is None:
        # Elsewhere the next step is launched before the last tokens are known, which pays more.
        ahead = CPU_AHEAD if loaded.device == "cpu" else 0
    config = msgspec.structs.replace(config, prefill_chunk=chunk, speculate=ahead)
    if loaded.device == "cpu":
        config = msgspec.structs.replace(config, burst=CPU_BURST)
    cache_use = None
    layout = Layout.of(loaded.model)
    if config.cache:
        disk, problem = _disk(config, layout, loaded.dtype)
        cache = PrefixCache(
            loaded.model, layout, cached, disk, pack=config.cache_quant, problem=problem
        )
        cache_use = CacheUse(cache, layout, config.checkpoint_every)
    forward = whole
    if loaded.device == "cpu" and 1 < blas.threads() <= MOST_LANES:
        forward = CpuPipeline(blas.threads()).forward
    engine = Engine(
        loaded.model,
        config,
        Sampler(backend),
        budget,
        transport,
        grammars,
        cache_use,
        forward,
        recorder,
    )
    transport.send(
        Ready(
            context=loaded.context,
            device=loaded.device,
            dtype=loaded.dtype,
            vocab_size=loaded.vocab_size,
            load_seconds=loaded.seconds,
            weight_bytes=loaded.weight_bytes,
            kv_budget=budget.limit,
            kv_bytes_per_token=budget.row(1024) // 1024,
            checkpoints=cache_use is not None and layout.needs.uncut,
        )
    )
    return engine


def _disk(config: EngineConfig, layout: Layout, dtype: str) -> tuple[DiskTier | None, str | None]:
    """The disk tier, or why there is none although one was asked for."""
    if not config.cache_disk:
        return None, None
    from millrace.cache.disk import DiskTier, DiskUnavailable, fingerprint

    folder = Path(config.cache_dir) if config.cache_dir else home() / "prefixes"
    packages = ("mlx", "mlx-lm")
    mark = fingerprint(
        Path(config.model),
        dtype=dtype,
        layout=" ".join((*layout.kinds, "8-bit" if config.cache_quant else "whole")),
        versions={name: metadata.version(name) for name in packages},
    )
    try:
        return DiskTier(folder, mark, config.cache_disk), None
    except DiskUnavailable as error:
        log.warning("the prefix cache has no disk tier: %s", error)
        return None, str(error)
