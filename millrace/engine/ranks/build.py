"""Putting a follower together: its part of the model, a runner and an executor, as the first rank's engine
has them, and nothing that decides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millrace.config import EngineConfig
from millrace.engine.ranks.leader import share_of
from millrace.engine.ranks.order import Share
from millrace.errors import ModelError
from millrace.models import blas, device

if TYPE_CHECKING:
    from millrace.cache.store import SegmentStore
    from millrace.engine.ranks.executors import FollowingExecutor


@dataclass
class FollowerParts:
    executor: FollowingExecutor
    store: SegmentStore | None
    on_disk: bool
    weight_bytes: int

    def peak(self) -> int:
        """The most bytes that this process has held, on its device or beside it."""
        try:
            import resource
        except ImportError:
            return device.memory_now().peak
        scale = 1 if sys.platform == "darwin" else 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
        return max(resident, device.memory_now().peak)


def build_follower(
    config: EngineConfig,
    meet: Callable[[], None],
    tell: Callable[[str], None],
    share: Callable[[Share], None],
) -> FollowerParts:
    """`meet` is called when all is ready for the group to be joined, `share` with what was loaded then."""
    device.before_import()
    blas.prepare()
    tell("loading")

    from millrace.cache.store import SegmentStore
    from millrace.engine.adapters import Adapters
    from millrace.engine.build import completed, disk_tier, pictures_room, rooms, warmed_rows
    from millrace.engine.memory import Budget
    from millrace.engine.ranks.executors import FollowingBatch, FollowingExecutor
    from millrace.engine.runner import Runner
    from millrace.engine.sampler import Sampler
    from millrace.engine.sampling import HostSampling
    from millrace.engine.vision_inputs import VisionInputs
    from millrace.engine.warmup import warm_up
    from millrace.models.load import load

    loaded = load(config, meet=meet)
    on_cpu = loaded.device == "cpu"
    config = completed(config, on_cpu)
    runner = Runner(loaded.model, loaded.caches, recurring=not on_cpu, group=loaded.group)
    pictures = pictures_room(config, loaded)
    kv, cached = rooms(config, loaded, taken=pictures)
    budget = Budget(replace(runner.cost, chunk=config.prefill_chunk or 0), kv)
    device.bound_freed(loaded.weight_bytes + kv + cached + pictures)
    store = disk = None
    if config.cache:
        disk, problem = disk_tier(config, runner.layout, loaded)
        if problem is not None:
            raise ModelError(f"The prefix cache has no disk there: {problem} Try --cache-disk 0.")
        segments = runner.segments(pack=config.cache_quant)
        store = SegmentStore(runner.make_caches, runner.layout, disk, segments)
    assert config.seat is not None
    mine = share_of(config.seat.rank, loaded.weight_bytes, budget, cached, pictures)
    mine.found = store.found() if store is not None else []
    share(mine)
    sampler = Sampler(HostSampling())
    if not on_cpu:
        warm_up(runner, sampler, warmed_rows(config), config.prefill_chunk or 0, FollowingBatch)
    executor = FollowingExecutor(
        runner,
        sampler,
        Adapters(runner.adapters, 0),
        VisionInputs(runner.model),
        None,
        store,
        vocabulary=loaded.vocab_size,
    )
    return FollowerParts(executor, store, disk is not None, loaded.weight_bytes)
