"""GET /v1/hub/search, against a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api import tiny_folder
from conftest import Server
from listing_hub import FakeHub

from millrace.models.hub_search import described, listed


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    running = FakeHub()
    yield running
    running.close()


@pytest.fixture(scope="module")
def searching(
    hub: FakeHub, tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("hub")
    folder = tiny_folder.make(home / "models" / "served", default_model)
    env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_ENDPOINT": hub.url}
    env |= {"HF_HUB_OFFLINE": "0"}
    running = Server(str(folder), "--memory", "8G", env=env, only=False).wait_ready()
    yield running
    running.stop()


def _found(server: Server, **query: Any) -> dict[str, dict[str, Any]]:
    answer = server.http.get("/v1/hub/search", params=query)
    assert answer.status_code == 200, answer.text
    return {m["source"]: m for m in answer.json()["models"]}


def test_models_are_found_with_size_bits_and_fit(searching: Server, hub: FakeHub) -> None:
    hub.asked.clear()
    found = _found(searching, q="qwen3")
    small = found["mlx-community/Qwen3-0.6B-4bit"]
    assert (small["bits"], small["bytes"]) == (4, 298_000_000)
    assert small["name"] and "chat" in small["uses"], "it is in the table of short names"
    assert small["fits"] and small["need_bytes"] > small["bytes"] and small["downloads"] == 900
    assert small["fit_reason"].startswith("Needs about") and not small["installed"]
    large = found["mlx-community/Qwen3-235B-4bit"]
    assert not large["fits"] and "more than the 8.6 GB" in large["fit_reason"]
    odd = found["acme/Qwen3-odd"]
    assert not odd["fits"] and "does not support its architecture" in odd["fit_reason"]
    unsized = found["acme/Qwen3-unsized"]
    assert unsized["bytes"] is None and "unknown" in unsized["fit_reason"] and unsized["gated"]
    plain = found["Qwen/Qwen3-0.6B"]
    assert (plain["bits"], plain["bytes"]) == (16, 1_200_000_000)
    assert (plain["name"], plain["uses"]) == (None, ["chat"])
    assert next(iter(found)) == "mlx-community/Qwen3-0.6B-4bit", "those that fit come first"
    assert len(hub.asked) == 2, "few are in MLX's format, so others are asked for"


def test_the_limit_holds(searching: Server) -> None:
    assert list(_found(searching, q="qwen3", limit=1)) == ["mlx-community/Qwen3-0.6B-4bit"]
    assert _found(searching, q="nothing like it") == {}


@pytest.mark.parametrize("query", [{}, {"q": ""}, {"q": "x" * 201}, {"q": "x", "limit": 0}])
def test_a_query_is_checked(searching: Server, query: dict[str, Any]) -> None:
    refused = searching.http.get("/v1/hub/search", params=query)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_request"


def test_a_hub_that_does_not_answer_is_reported_within_the_deadline(
    searching: Server, hub: FakeHub
) -> None:
    hub.hold()
    try:
        refused = searching.http.get("/v1/hub/search", params={"q": "slow"}, timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "hub_unreachable"
        assert "4 seconds" in refused.json()["error"]["message"]
        assert searching.health()["status"] == "ready"
    finally:
        hub.release()
    assert _found(searching, q="qwen3")


def test_without_a_network_and_with_only_it_is_refused_with_the_reason(
    start: Callable[..., Server], searching: Server, tmp_path: Path, default_model: Path
) -> None:
    folder = tiny_folder.make(tmp_path / "served", default_model)
    only = start(str(folder), env={"HF_HUB_OFFLINE": "1"}).wait_ready()
    refused = only.http.get("/v1/hub/search", params={"q": "qwen"})
    assert refused.status_code == 403 and "--only" in refused.json()["error"]["message"]
    assert only.http.get("/v1/library").json()["fetchable"] is False
    assert searching.http.get("/v1/library").json()["fetchable"] is True


def test_offline_mode_is_no_network(
    start: Callable[..., Server], hub: FakeHub, tmp_path: Path, default_model: Path
) -> None:
    folder = tiny_folder.make(tmp_path / "served", default_model)
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    env |= {"MILLRACE_HOME": str(tmp_path)}
    offline = start(str(folder), env=env, only=False).wait_ready()
    hub.asked.clear()
    refused = offline.http.get("/v1/hub/search", params={"q": "qwen"})
    assert refused.status_code == 503 and "HF_HUB_OFFLINE" in refused.json()["error"]["message"]
    assert hub.asked == []


def test_what_the_hub_answers_is_checked(searching: Server, hub: FakeHub) -> None:
    for status, body in ((500, "[]"), (200, "<html>"), (200, '[{"id": 1}]'), (200, "{}")):
        hub.instead = (status, body)
        try:
            refused = searching.http.get("/v1/hub/search", params={"q": "qwen"})
        finally:
            hub.instead = None
        assert refused.status_code == 503, body
        assert "cannot be searched" in refused.json()["error"]["message"]


def _row(id: str = "org/name", bits: Any = 4, count: int = 10**9) -> dict[str, Any]:
    config = {"model_type": "qwen3", "quantization_config": {"bits": bits}}
    return {"id": id, "config": config, "safetensors": {"parameters": {"U32": count}}}


def test_a_repository_that_lies_is_not_believed() -> None:
    for bits in (0, -1, True, 2**62, 10**30, "4", None, [4]):
        (model,) = described(listed(json.dumps([_row(bits=bits)]).encode()), 9, 10**10)
        assert model.bits is None and not model.fits, bits
    for count in (-(10**9), 10**30, 2**62, 0):
        (model,) = described(listed(json.dumps([_row(count=count)]).encode()), 9, 10**10)
        assert model.bytes is None and not model.fits and "unknown" in model.fit_reason, count
    assert described(listed(json.dumps([_row(count=2 * 10**9)]).encode()), 9, None)[0].bytes


def test_a_repository_that_cannot_be_read_hides_no_other() -> None:
    names = ["<script>/x", "..", "../x", "a" * 300 + "/b", "a\0/b", "", "org/name/more"]
    odd = [_row(name) for name in names] + [{"id": "org/odd", "config": "none"}, {"id": 7}]
    assert [m.id for m in listed(json.dumps([*odd, _row()]).encode())] == ["org/name"]
    deep = b'[{"id": "org/deep", "config": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}]"
    with pytest.raises(msgspec.DecodeError, match="deeply"):
        listed(deep)
