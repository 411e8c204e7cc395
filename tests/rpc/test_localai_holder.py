"""The one model of a backend, without any engine: what is let go of is let go of to the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from millrace.config import EngineConfig
from millrace.rpc.localai.holder import HeldModel, Holder
from millrace.rpc.localai.loading import LoadingPlan
from millrace.serving.registry import Registry

PATIENCE = 60.0


class _Busy:
    """The models of a backend whose answers do not end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.stopped = False

    async def unload(self, name: str) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True


def test_a_model_that_is_being_released_when_the_end_comes_is_stopped() -> None:
    async def scene() -> None:
        nothing = cast(Any, None)
        holder = Holder(EngineConfig(model="", name="m"), nothing, nothing, nothing, PATIENCE)
        registry = _Busy()
        plan = cast(LoadingPlan, SimpleNamespace(identity="m", spec=SimpleNamespace(name="m")))
        holder._held = HeldModel(plan, cast(Registry, registry))
        freeing = asyncio.create_task(holder.free())
        async with asyncio.timeout(PATIENCE):
            await registry.asked.wait()
            await holder.stop()
        await asyncio.gather(freeing, return_exceptions=True)
        assert registry.stopped

    asyncio.run(scene())
