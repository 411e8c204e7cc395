"""The one model of a backend: loaded, asked, let go of, and another loaded after it.

Loads and releases wait for each other and for running answers; asking never waits for either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.config import EngineConfig
from millrace.errors import EngineUnavailable, MillraceError, NotFound, NotLoaded
from millrace.models.footprint import device_budget
from millrace.rpc.localai.loading import LoadingPlan
from millrace.serving.adapters import AdapterLibrary
from millrace.serving.catalogue import Catalogue
from millrace.serving.client import EngineClient
from millrace.serving.keeper import State
from millrace.serving.media import MediaDesk
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.registry import Registry

log = logging.getLogger("millrace.rpc")
_IDLE = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class HeldModel:
    """A model that is loaded."""

    plan: LoadingPlan
    registry: Registry

    @property
    def client(self) -> EngineClient | None:
        return next((i.client for i in self.registry.instances() if i.phase == "loaded"), None)

    @property
    def is_well(self) -> bool:
        client = self.client
        return client is not None and client.state not in (State.FAILED, State.STOPPED)


class Holder:
    def __init__(
        self,
        base: EngineConfig,
        workplace: Workplace,
        metrics: Metrics,
        media: MediaDesk,
        patience: float,
    ) -> None:
        """`patience` is how many seconds running answers get when their model is let go of."""
        self.base = base
        self._workplace = workplace
        self._metrics = metrics
        self._media = media
        self._patience = patience
        self._held: HeldModel | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def held(self) -> HeldModel | None:
        return self._held

    @property
    def is_changing(self) -> bool:
        """Whether a model is being loaded or let go of."""
        return self._changing.locked()

    async def load(self, plan: LoadingPlan) -> None:
        """Have this model and no other."""
        await self._apart(self._load(plan))

    async def free(self) -> bool:
        """Let the model go, its memory with it; False if there was none."""
        return await self._apart(self._free())

    def _apart(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Work that goes on if whoever asked for it leaves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody waits after a client left

    async def _load(self, plan: LoadingPlan) -> None:
        async with self._changing:
            if self._held is not None and self._held.plan == plan and self._held.is_well:
                return
            await self._leave()
            adapters = AdapterLibrary()
            launcher = ModelLauncher(
                self._workplace,
                self._metrics,
                idle=_IDLE,
                max_queue=plan.max_queue,
                adapters=adapters,
                media=self._media,
            )
            limit = plan.memory or await asyncio.to_thread(device_budget)
            registry = Registry(
                Catalogue([plan.spec]), launcher, self._metrics, limit=limit, adapters=adapters
            )
            try:
                await registry.load(plan.spec.name)
                if plan.adapter is not None:
                    self._check_adapter(registry, plan.adapter)
            except BaseException:
                await registry.stop()
                raise
            self._held = HeldModel(plan, registry)
            log.info("%s is loaded", plan.identity)

    def _check_adapter(self, registry: Registry, name: str) -> None:
        found = registry.adapters.find(name)
        if found is None or found[1].problem is not None:
            problem = found[1].problem if found else "it was not loaded"
            raise EngineUnavailable(f"the adapter cannot be used: {problem}")

    async def _free(self) -> bool:
        async with self._changing:
            return await self._leave()

    async def _leave(self) -> bool:
        held, self._held = self._held, None
        if held is None:
            return False
        try:
            async with asyncio.timeout(self._patience):
                await held.registry.unload(held.plan.spec.name)
        except TimeoutError:
            for model in held.registry.all():
                model.client.fail_all(EngineUnavailable("The model was released."))
        except MillraceError as error:
            log.warning("%s: %s", held.plan.identity, error.message)
        finally:
            await held.registry.stop()  # nobody else has it, though this be cancelled
        log.info("%s is released", held.plan.identity)
        return True

    @contextlib.asynccontextmanager
    async def asked(self, identity: str = "") -> AsyncIterator[tuple[HeldModel, ServedModel]]:
        """The model for as long as somebody asks it; `identity` is the one that is meant."""
        held = self._held
        if held is None:
            raise NotLoaded(
                "The model is on its way in or out: ask again when that is done."
                if self.is_changing
                else "No model is loaded: LoadModel first."
            )
        if identity and identity != held.plan.identity:
            raise NotFound(
                f"model identity mismatch: loaded '{held.plan.identity}', requested '{identity[:200]}'"
            )
        lease = await held.registry.lease(held.plan.spec.name)
        try:
            model = lease.model
            adapter = held.registry.adapters.find(held.plan.adapter)
            yield held, model.adapted(adapter[1]) if adapter else model
        finally:
            lease.release()

    async def stop(self) -> None:
        """End the engine at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        held, self._held = self._held, None
        if held is not None:
            await held.registry.stop()
