"""Putting an engine together: the BLAS before MLX, the model, the sampler that fits the device."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace import descriptors, native
from millrace.config import FEWEST_RUNNING, EngineConfig, home
from millrace.distributed import environment
from millrace.engine.ranks.leader import Leader, smallest
from millrace.engine.transport import Transport
from millrace.errors import ModelError
from millrace.flight import FlightRecorder
from millrace.models import blas, device
from millrace.models.description import weight_files
from millrace.models.encoders import encoder_in
from millrace.models.footprint import CACHE_SHARE, DRAFT_PART
from millrace.models.vision.families import picture_room
from millrace.native import LOADING
from millrace.occupancy import occupy
from millrace.protocol import Loading, Ready

if TYPE_CHECKING:
    from millrace.cache.disk import DiskTier
    from millrace.cache.state import Layout
    from millrace.engine.encoding.loop import EncoderEngine
    from millrace.engine.loop import Engine
    from millrace.engine.memory import Budget
    from millrace.models.load import LoadedModel

log = logging.getLogger("millrace.engine")

_LEAST_KV_MEMORY = 256 << 20
_LEAST_CACHE = 64 << 20
_FEWEST_FILES = 64
"""Descriptors that an engine needs beside its weights."""
_NOTED = 0.05
"""The part of a model's layers after which its loading is told of again."""
_LEAST_ADAPTERS = 64 << 20
CPU_CHUNK, GPU_CHUNK = 512, 2048
"""The most prompt tokens of a chunk, where the configuration does not say."""
CPU_STALL, GPU_STALL = 0.5, 0.05
"""Seconds that no step is planned to take longer than, where the configuration does not say: a pass
costs much by itself on a CPU, and should hold many tokens there; a GPU gains little beyond."""
NO_ADAPTERS = "A model that is split over ranks takes no adapters; serve it from one machine."
CPU_AHEAD = 8
"""Draft tokens of a row there, at most."""
MOST_RUNNING = 256
"""Sequences that run at a time on a GPU, at most, where the configuration does not say."""
_USUAL_LENGTH = 1024
"""Tokens of a sequence by which that number follows from the memory."""
_WARMED = 64
"""Rows up to which a warm-up goes."""


def build(
    config: EngineConfig, transport: Transport, recorder: FlightRecorder | None = None
) -> Engine | EncoderEngine:
    """Load the model and say ready. Raises ModelError when it cannot be loaded."""
    # Before anything imports mlx.core: a BLAS loaded later is not used.
    device.before_import()
    blas.prepare()
    occupy()
    transport.send(Loading(LOADING))
    files = weight_files(Path(config.model))
    # MLX opens all of them before it reads the first.
    needed, what = len(files) + _FEWEST_FILES, f"A model in {len(files)} files of weights"
    if (short := descriptors.shortage(needed, what)) is not None:
        raise ModelError(short)
    facts = encoder_in(config)
    if facts is not None:
        if config.group is not None:
            raise ModelError(
                "A model that makes numbers cannot be split: serve it from one machine."
            )
        from millrace.engine.encoding.build import build_encoder

        return build_encoder(config, facts, transport, recorder)

    if blas.mlx_backend() == "cpu" and config.weights == "auto":
        native.begin_early()

    from millrace.cache.index import PrefixIndex
    from millrace.cache.state import sizes_of
    from millrace.cache.store import SegmentStore
    from millrace.engine.assembly import assemble
    from millrace.engine.executor import Executor
    from millrace.engine.grammar import Grammars
    from millrace.engine.memory import Budget
    from millrace.engine.ranks.disk import LeadingStore
    from millrace.engine.ranks.executors import LeadingExecutor
    from millrace.engine.runner import Runner
    from millrace.engine.sampler import Sampler
    from millrace.engine.sampling import DeviceSampling, HostSampling, SamplingBackend
    from millrace.engine.specprefill.draft import DraftModel, draft_of, load_draft
    from millrace.engine.warmup import warm_up, warm_up_draft
    from millrace.models.load import load

    last = (LOADING, -1.0)

    def note(share: float, stage: str = LOADING) -> None:
        nonlocal last
        if stage != last[0] or share - last[1] >= _NOTED:
            last = (stage, share)
            transport.send(Loading(stage, share))

    leader = _leader(config, transport)
    loaded = load(config, note, leader.meet) if leader else load(config, note)
    environment.leave()  # the group has been joined
    beside: LoadedModel | None = None
    if config.specprefill is not None:
        transport.send(Loading("loading the draft"))
        beside = load_draft(config, config.specprefill, loaded)
    on_cpu = loaded.device == "cpu"
    backend: SamplingBackend = HostSampling() if on_cpu else DeviceSampling()
    config = completed(config, on_cpu)
    pictures, drafted = pictures_room(config, loaded), 0
    weights = loaded.weight_bytes
    if beside is not None:
        weights += beside.weight_bytes
        drafted = config.draft_memory or max(_LEAST_CACHE, _spare(config, loaded) // DRAFT_PART)
    kv, cached = rooms(config, loaded, pictures + drafted + weights - loaded.weight_bytes)
    runner = Runner(loaded.model, loaded.caches, recurring=not on_cpu, group=loaded.group)
    budget = Budget(replace(runner.cost, chunk=config.prefill_chunk or 0), kv)
    if leader:
        shares = leader.shares()
        kv, cached = smallest(budget, cached, shares)
        pictures = min([pictures, *(share.picture_bytes for share in shares)])
        budget = Budget(budget.cost, kv)
    state = budget.limit + (cached if config.cache else 0)
    device.bound_freed(weights + state + pictures + drafted)
    warmed = warmed_rows(config)
    running = most_running(config, budget, on_cpu)
    config = msgspec.structs.replace(config, max_running=running)
    draft: DraftModel | None = None
    if beside is not None:
        draft = draft_of(config, beside, loaded, drafted)
    index = store = None
    problem: str | None = None
    if config.cache:
        disk, problem = disk_tier(config, runner.layout, loaded)
        pack = config.cache_quant
        parts = (runner.make_caches, runner.layout, disk, runner.segments(pack=pack))
        store = LeadingStore(leader, *parts) if leader else SegmentStore(*parts)
        index = PrefixIndex(
            runner.layout.needs,
            runner.sizes(sizes_of(runner.layout, loaded.caches, pack), pack=pack),
            cached,
            disk_budget=disk.budget if disk else None,
            problem=problem,
            told=config.cache_told,
        )
    if not on_cpu:
        if draft is not None:
            warm_up_draft(draft.runner, config.prefill_chunk or 0)
        transport.send(Loading("compiling kernels"))
        if loaded.sees:
            loaded.model.warm_up()
        warm_up(runner, Sampler(backend), warmed, config.prefill_chunk or 0)
    engine = assemble(
        runner,
        config,
        Sampler(backend),
        budget,
        transport,
        # The others wait for the tokens that were drawn before they can launch anything.
        pipelined=not on_cpu and leader is None,
        grammars=Grammars(Path(config.model), loaded.vocab_size),
        index=index,
        store=store,
        recorder=recorder,
        vocabulary=loaded.vocab_size,
        adapter_room=config.adapter_memory or max(_LEAST_ADAPTERS, state // 10),
        picture_room=pictures,
        journal=leader.journal if leader else None,
        executes=LeadingExecutor if leader else Executor,
        no_adapters=NO_ADAPTERS if leader else None,
        closing=leader.close if leader else None,
        closed=leader.end if leader else None,
        draft=draft,
    )
    if leader:
        leader.lead(engine.state, engine.features)
    transport.send(
        Ready(
            context=loaded.context,
            device=loaded.device,
            dtype=loaded.dtype,
            vocab_size=loaded.vocab_size,
            load_seconds=loaded.seconds,
            weight_bytes=weights,
            kv_budget=budget.limit,
            kv_bytes_per_token=budget.cost.row(_USUAL_LENGTH) // _USUAL_LENGTH,
            max_running=running,
            device_bytes=device.describe().memory,
            memory=device.memory_now(),
            checkpoints=index is not None and runner.layout.needs.uncut,
            cache_note=problem,
        )
    )
    return engine


def _leader(config: EngineConfig, transport: Transport) -> Leader | None:
    if config.seat is None or config.group is None:
        return None
    environment.enter(config.group, config.seat.rank)
    return Leader(config, lambda stage: transport.send(Loading(stage)))


def _spare(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes that there are for state; ranks that share a machine share its memory."""
    memory = loaded.memory
    if config.seat is not None and config.group is not None and not config.seat.alone:
        memory //= len(config.group.hosts)
    return int(0.8 * (memory - loaded.weight_bytes))


def pictures_room(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes for what pictures have become."""
    if not loaded.sees:
        return 0
    return config.picture_memory or picture_room(_spare(config, loaded))


def rooms(config: EngineConfig, loaded: LoadedModel, taken: int) -> tuple[int, int]:
    """Bytes for the state of running requests, and for the prefix cache, beside what is `taken` by pictures
    and a draft."""
    spare = _spare(config, loaded)
    cached = config.cache_memory or max(_LEAST_CACHE, int(CACHE_SHARE * spare))
    rest = spare - cached if config.cache else spare
    rest -= taken + (config.adapter_memory or 0)
    kv = config.kv_memory or max(_LEAST_KV_MEMORY, rest)
    if config.seat is not None and config.seat.rank:
        # What the first rank's machine has, another need not have.
        kv, cached = min(kv, max(1, rest)), min(cached, max(1, spare))
    return kv, cached


def completed(config: EngineConfig, on_cpu: bool) -> EngineConfig:
    """What nobody has said, as it suits the device."""
    ahead = config.speculate
    if ahead is None:
        # Elsewhere the next step is launched before the last tokens are known, which pays more.
        ahead = CPU_AHEAD if on_cpu else 0
    return msgspec.structs.replace(
        config,
        prefill_chunk=config.prefill_chunk or (CPU_CHUNK if on_cpu else GPU_CHUNK),
        speculate=ahead,
        max_stall=config.max_stall or (CPU_STALL if on_cpu else GPU_STALL),
    )


def most_running(config: EngineConfig, budget: Budget, on_cpu: bool) -> int:
    """Sequences that run at a time, at most. On a CPU more of them make nothing faster."""
    if config.max_running is not None:
        return config.max_running
    if on_cpu:
        return FEWEST_RUNNING
    fit = budget.limit // max(1, budget.row(_USUAL_LENGTH))
    return max(FEWEST_RUNNING, min(MOST_RUNNING, fit))


def warmed_rows(config: EngineConfig) -> int:
    """Rows up to which the kernels are compiled before the engine is ready."""
    return min(config.max_running or _WARMED, _WARMED)


def disk_tier(
    config: EngineConfig, layout: Layout, loaded: LoadedModel
) -> tuple[DiskTier | None, str | None]:
    """The disk tier, or why there is none although one was asked for."""
    if not config.cache_disk:
        return None, None
    dtype = f"{loaded.dtype} by own kernels" if loaded.native else loaded.dtype
    if config.seat is not None and config.group is not None:
        size, how = len(config.group.hosts), config.group.parallel
        dtype = f"{dtype}, rank {config.seat.rank} of {size}, {how}"
    libraries = ("mlx", "mlx-lm", "mlx-vlm") if loaded.sees else ("mlx", "mlx-lm")
    from millrace.cache.disk import DiskTier, DiskUnavailable, fingerprint

    folder = Path(config.cache_dir) if config.cache_dir else home() / "prefixes"
    mark = fingerprint(
        Path(config.model),
        dtype=dtype,
        layout=" ".join((*layout.kinds, "8-bit" if config.cache_quant else "whole")),
        versions={name: metadata.version(name) for name in libraries},
    )
    try:
        return DiskTier(folder, mark, config.cache_disk, server_port=config.server_port), None
    except DiskUnavailable as error:
        log.warning("the prefix cache has no disk tier: %s", error)
        return None, str(error)
