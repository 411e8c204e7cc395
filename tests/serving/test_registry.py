"""Who may have a model: what holds when many ask for it at one moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from millrace.config import EngineConfig
from millrace.errors import ModelNotFound, TooManyWaiting
from millrace.serving.catalogue import Catalogue, ModelSpec
from millrace.serving.client import EngineClient
from millrace.serving.connection import Connection
from millrace.serving.group import Group
from millrace.serving.instance import Instance, Lease
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.registry import Registry
from millrace.serving.residency import Need

MAX_WAITING = 2
AT_ONCE = 5  # not more than there are threads to read files with


async def _never() -> Connection:
    await asyncio.Event().wait()
    raise AssertionError


class _Nowhere(Workplace):
    """Where no engine ever starts."""

    def launcher(
        self, config: Callable[[], EngineConfig], group: Group | None = None
    ) -> Callable[[], Awaitable[Connection]]:
        return _never


class _Slow(ModelLauncher):
    """Nobody knows what a model needs before all who ask do; its text side is never read."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(_Nowhere(), metrics, idle=1.0, max_queue=1)
        self._together = threading.Barrier(AT_ONCE)

    def check(self, spec: ModelSpec) -> None:
        """Its files are as they should be."""

    def need(self, spec: ModelSpec) -> Need:
        self._together.wait(60)
        return Need(1 << 50, 0)

    async def text(self, spec: ModelSpec, client: EngineClient) -> ServedModel:
        await asyncio.Event().wait()
        raise AssertionError


def _undecided(asked: list[asyncio.Task[Lease]], instance: Instance) -> int:
    return len(asked) - sum(task.done() for task in asked) - instance.leases


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return ModelSpec(EngineConfig(model=str(tmp_path), name="late"), named=True)


def test_no_more_wait_than_may_though_all_ask_before_the_first_is_let_in(spec: ModelSpec) -> None:
    async def ask() -> list[object]:
        metrics = Metrics()
        registry = Registry(
            Catalogue([spec]), _Slow(metrics), metrics, limit=1 << 60, max_waiting=MAX_WAITING
        )
        asked = [asyncio.create_task(registry.lease("late")) for _ in range(AT_ONCE)]
        while not registry.instances() or _undecided(asked, registry.instances()[0]):
            await asyncio.sleep(0.01)
        (instance,) = registry.instances()
        assert instance.waiting == instance.leases == MAX_WAITING
        for task in asked:
            task.cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(ask())
    assert sum(isinstance(f, TooManyWaiting) for f in found) == AT_ONCE - MAX_WAITING
    assert sum(isinstance(f, asyncio.CancelledError) for f in found) == MAX_WAITING


def test_who_only_looks_at_a_model_takes_nobodys_place(spec: ModelSpec) -> None:
    async def look() -> None:
        metrics = Metrics()
        registry = Registry(Catalogue([spec]), _Slow(metrics), metrics, max_waiting=1)
        asked = [asyncio.create_task(registry.lease("late", loads=False)) for _ in range(AT_ONCE)]
        await asyncio.wait(asked, timeout=0.1)
        (instance,) = registry.instances()
        assert (instance.waiting, instance.leases) == (0, AT_ONCE)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert instance.leases == 0

    asyncio.run(look())


def test_who_names_no_model_is_told_so(tmp_path: Path) -> None:
    specs = []
    for name in ("early", "late"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        specs.append(ModelSpec(EngineConfig(model=str(folder), name=name), named=True))

    async def ask() -> None:
        metrics = Metrics()
        registry = Registry(Catalogue(specs), _Slow(metrics), metrics, limit=1 << 60)
        await registry.spec(None)

    with pytest.raises(ModelNotFound, match="The request names no model. Models served: "):
        asyncio.run(ask())
