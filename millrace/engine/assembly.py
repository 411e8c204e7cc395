"""An engine from its parts: what the runner can, the configuration wants and the cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.config import FEWEST_RUNNING, EngineConfig
from millrace.engine.adapters import Adapters
from millrace.engine.cache_use import CacheUse
from millrace.engine.decider import Decider, DeciderSettings
from millrace.engine.executor import Executor
from millrace.engine.grammar import Grammars
from millrace.engine.loop import Closing, Engine, Journal
from millrace.engine.memory import Budget
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.engine.specprefill.draft import DraftModel
from millrace.engine.transport import Transport
from millrace.engine.vision_inputs import VisionInputs
from millrace.flight import FlightRecorder, NullRecorder

if TYPE_CHECKING:
    from millrace.cache.index import PrefixIndex
    from millrace.cache.store import SegmentStore

DEFAULT_CHUNK = 512
DEFAULT_STALL = 0.5
NO_LIMIT = 1 << 62


def settings_of(
    config: EngineConfig, *, pipelined: bool, flat: bool, lends: bool
) -> DeciderSettings:
    return DeciderSettings(
        max_running=config.max_running or FEWEST_RUNNING,
        chunk=config.prefill_chunk or DEFAULT_CHUNK,
        max_stall=config.max_stall or DEFAULT_STALL,
        speculate=config.speculate or 0,
        # Draft tokens need the last tokens. Where draws are the host's own work, waiting costs nothing.
        pipelined=pipelined and not config.speculate,
        flat=flat,
        lends=lends and not config.cache_quant,
    )


def assemble(
    runner: Runner,
    config: EngineConfig,
    sampler: Sampler,
    budget: Budget,
    transport: Transport,
    *,
    pipelined: bool,
    grammars: Grammars | None = None,
    index: PrefixIndex | None = None,
    store: SegmentStore | None = None,
    recorder: FlightRecorder | None = None,
    journal: Journal | None = None,
    vocabulary: int | None = None,
    adapter_room: int = NO_LIMIT,
    picture_room: int = NO_LIMIT,
    executes: type[Executor] = Executor,
    no_adapters: str | None = None,
    closing: Closing | None = None,
    closed: Callable[[], None] | None = None,
    draft: DraftModel | None = None,
) -> Engine:
    """`no_adapters` says why adapters cannot be had."""
    recorder = recorder or NullRecorder()
    cache = None
    if index is not None:
        cache = CacheUse(index, config.checkpoint_every, uncut=runner.layout.needs.uncut)
    decider = Decider(
        settings_of(config, pipelined=pipelined, flat=runner.flat, lends=runner.lends),
        budget,
        cache,
        picture_room=picture_room,
        whole_pictures=getattr(runner.model, "whole_pictures", False),
        scorings=draft.scorings if draft is not None else None,
    )
    runner.limit = budget.limit + (index.memory if index is not None else 0)
    vision_inputs = VisionInputs(runner.model)
    adapters = Adapters(runner.adapters, adapter_room, no_adapters)
    made = runner, sampler, adapters, vision_inputs, grammars, store, recorder, vocabulary
    executor = executes(*made, draft.scorer if draft is not None else None)
    return Engine(
        decider,
        executor,
        transport,
        grammars,
        store,
        recorder,
        adapters=adapters,
        vision_inputs=vision_inputs,
        journal=journal,
        closing=closing,
        closed=closed,
    )
