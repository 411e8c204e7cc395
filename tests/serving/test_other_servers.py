"""A server's budget beside other servers: what they hold counts, what they may take does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.config import EngineConfig
from millrace.errors import OutOfMemory
from millrace.servers import ServerMemory, ServerRecord
from millrace.serving.catalogue import Catalogue, ModelSpec
from millrace.serving.memory import OtherServers
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.registry import Registry

GB = 10**9
FIRST = ServerRecord(
    host="127.0.0.1",
    port=8001,
    pid=1,
    name="one",
    memory=ServerMemory(weights=1 * GB, kv_in_use=1 * GB, ceiling=15 * GB, held=3 * GB),
)
CARD = ServerRecord(
    host="127.0.0.1", port=8002, pid=2, pool="cuda", memory=ServerMemory(held=9 * GB)
)


def registry_of(found: list[ServerRecord], metrics: Metrics) -> Registry:
    launcher = ModelLauncher(Workplace(), metrics, idle=1.0, max_queue=1)
    others = OtherServers(lambda: found, "host")
    return Registry(Catalogue([]), launcher, metrics, limit=16 * GB, others=others)


def test_the_limit_leaves_what_others_hold_and_follows_them(
    tmp_path: Path, default_model: Path
) -> None:
    found, metrics = [FIRST, CARD], Metrics()
    registry = registry_of(found, metrics)
    assert (registry.limit, registry.taken_by_others) == (13 * GB, 3 * GB)
    assert "millrace_memory_other_servers_bytes 3e+09" in metrics.text().decode()
    found.clear()
    spec = ModelSpec(EngineConfig(model=str(default_model), name="m"))
    registry._residents.check("m", registry.need(spec))
    assert (registry.limit, registry.taken_by_others) == (16 * GB, 0)
    assert "millrace_memory_limit_bytes 1.6e+10" in metrics.text().decode()


def test_a_model_that_does_not_fit_beside_others_is_refused_with_what_they_hold(
    default_model: Path,
) -> None:
    async def load() -> None:
        metrics = Metrics()
        taken = ServerMemory(weights=1 * GB, ceiling=18 * GB, held=16 * GB - 100 * 10**6)
        record = ServerRecord(host="127.0.0.1", port=8001, pid=1, name="one", memory=taken)
        launcher = ModelLauncher(Workplace(), metrics, idle=1.0, max_queue=1)
        spec = ModelSpec(EngineConfig(model=str(default_model), name="m"), named=True)
        others = OtherServers(lambda: [record], "host")
        registry = Registry(Catalogue([spec]), launcher, metrics, limit=16 * GB, others=others)
        registry.preload([spec])

    with pytest.raises(OutOfMemory) as refused:
        asyncio.run(load())
    text = refused.value.message
    assert "together may take 100 MB" in text
    assert "hold now: one (port 8001) 15.9 GB (at most 18.0 GB)" in text
    assert "end another server" in text and "--memory" in text


def test_without_others_nothing_is_said_of_them() -> None:
    others = OtherServers(lambda: [CARD], "host")
    assert (others.held(), others.in_words()) == (0, "")
