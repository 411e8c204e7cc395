"""Loads that end otherwise than they should: whoever waits hears of it, and nobody else is held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from millrace.config import EngineConfig
from millrace.errors import EngineUnavailable, LoadFailed, ModelError
from millrace.serving.admission import Admission
from millrace.serving.catalogue import Catalogue, ModelSpec
from millrace.serving.client import EngineClient
from millrace.serving.connection import Connection
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.ranks.group import RankGroup
from millrace.serving.registry import Registry
from millrace.serving.residency import Need

PATIENCE = 60.0


class _Text:
    """As much of a model as its instance needs."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    def check_gives(self, wanted: object) -> None:
        pass

    async def stop(self) -> None:
        await self.client.stop()


class _Group:
    """Whose workers the server has started."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def end(self) -> None:
        self.ended.set()


class _Opener:
    """Whose engines cannot be launched."""

    def __init__(self, metrics: Metrics, trouble: Exception) -> None:
        self._metrics = metrics
        self._trouble = trouble
        self.launches = 0
        self.group: _Group | None = None
        self.untold: Exception | None = None
        self.needs: list[threading.Event] = []
        """For each call, what it waits for."""

    def check(self, spec: ModelSpec) -> None:
        """Its files are as they should be."""

    def need(self, spec: ModelSpec) -> Need:
        if self.needs:
            assert self.needs.pop(0).wait(PATIENCE)
        return Need(1 << 20, 0)

    def engine_config(self, spec: ModelSpec, state: int | None) -> EngineConfig:
        if self.untold is not None:
            raise self.untold
        return spec.engine

    def client(self, spec: ModelSpec, config: Callable[[], EngineConfig]) -> EngineClient:
        made = EngineClient(self._launch, Admission(8, 8), self._metrics.of(spec.name))
        made.group = cast(RankGroup | None, self.group)
        return made

    async def _launch(self) -> Connection:
        self.launches += 1
        raise self._trouble

    async def text(self, spec: ModelSpec, client: EngineClient) -> ServedModel:
        return cast(ServedModel, _Text(client))

    async def tidy(self) -> None:
        pass


class Scene:
    def __init__(self, folder: Path, trouble: Exception) -> None:
        self.spec = ModelSpec(EngineConfig(model=str(folder), name="late"), named=True)
        metrics = Metrics()
        self.opener = _Opener(metrics, trouble)
        self.registry = Registry(Catalogue([self.spec]), self.opener, metrics, limit=1 << 40)


def play(
    folder: Path, scene: Callable[[Scene], Awaitable[Any]], trouble: Exception | None = None
) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')

    async def run() -> None:
        async with asyncio.timeout(PATIENCE):
            await scene(Scene(folder, trouble or OSError(24, "Too many open files")))

    asyncio.run(run())


def test_whoever_waits_for_an_engine_hears_that_it_was_never_launched(tmp_path: Path) -> None:
    async def scene(at: Scene) -> None:
        look = await at.registry.lease("late", loads=False)
        lease = await at.registry.lease("late")
        client = lease.model.client
        with pytest.raises(ModelError, match="Too many open files"):
            await client.settled()
        for held in (look, lease):
            held.release()

    play(tmp_path, scene)


@pytest.mark.parametrize("trouble", [zmq.ZMQError(24), RuntimeError("odd")])
def test_a_load_fails_of_whatever_its_launch_fails_of(tmp_path: Path, trouble: Exception) -> None:
    async def scene(at: Scene) -> None:
        with pytest.raises(ModelError, match="cannot be started"):
            await at.registry.load("late")
        assert at.registry.standing(at.spec).state == "failed"

    play(tmp_path, scene, trouble)


def test_a_model_whose_files_went_while_it_waited_holds_up_nobody(tmp_path: Path) -> None:
    async def scene(at: Scene) -> None:
        at.opener.untold = ModelError("it is not a model folder")
        with pytest.raises(ModelError, match="not a model folder"):
            await at.registry.lease("late")
        await at.registry.pin("late", False)
        assert at.registry.standing(at.spec).state == "failed"

    play(tmp_path, scene)


def test_a_load_that_failed_while_another_asked_is_not_tried_again_at_once(tmp_path: Path) -> None:
    async def scene(at: Scene) -> None:
        first, second = at.opener.needs = [threading.Event(), threading.Event()]
        asked = [asyncio.create_task(at.registry.lease("late")) for _ in range(2)]
        first.set()
        while at.registry.standing(at.spec).state != "failed":
            await asyncio.sleep(0.005)
        second.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert at.opener.launches == 1
        assert sum(isinstance(f, LoadFailed) for f in found) == 1

    play(tmp_path, scene)


def test_nobody_is_let_in_who_asked_before_the_end_and_was_read_after_it(tmp_path: Path) -> None:
    async def scene(at: Scene) -> None:
        (reading,) = at.opener.needs = [threading.Event()]
        asked = asyncio.create_task(at.registry.lease("late"))
        while at.opener.needs:
            await asyncio.sleep(0.005)
        await at.registry.stop()
        reading.set()
        with pytest.raises(EngineUnavailable):
            await asked
        assert not at.registry.instances()

    play(tmp_path, scene)


def test_workers_of_a_group_end_with_it_though_no_start_of_it_is_under_way(tmp_path: Path) -> None:
    async def scene(at: Scene) -> None:
        group = at.opener.group = _Group()
        with pytest.raises(ModelError):
            await at.registry.load("late")
        await group.ended.wait()

    play(tmp_path, scene)
