"""Several models on one server: loaded when they are asked for, as many as there is memory for."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters_help import random_pairs, write_mlx
from api import tiny_folder
from conftest import Gate, Server, held
from models import encoder_folders

ROOM_FOR_TWO = "760M"
NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    for name in NAMES:
        tiny_folder.make(folder / name, default_model)
    return folder


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """While it is closed, whatever is loaded goes on loading."""
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def shared(shelf: Path, gate: Gate) -> Iterator[Server]:
    home = shelf.parent / "home"
    env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    server = Server(
        str(shelf / "alpha"), "--on-demand", "--model-dir", str(shelf), "--memory", ROOM_FOR_TWO,
        "--keep-alive", "0.05", "--max-waiting", "30", env=env | gate.env, only=False,
    ).wait_ready()  # fmt: skip
    yield server
    server.stop()


@pytest.fixture
def models(shared: Server) -> Server:
    """A server with nothing loaded."""
    for name in NAMES:
        shared.post(f"/v1/models/{name}/pin", {"pin": False})
        shared.http.post(f"/v1/models/{name}/unload")
    _until(lambda: not _loaded(shared))
    return shared


def _ask(server: Server, name: str, **more: Any) -> httpx.Response:
    body = {"model": name, "prompt": "a b", "max_tokens": 2, "ignore_eos": True}
    return server.post("/v1/completions", body | more)


def _loaded(server: Server) -> dict[str, dict[str, Any]]:
    return {m["name"]: m for m in server.http.get("/v1/status").json()["models"]}


def _states(server: Server) -> dict[str, str]:
    return {m["id"]: m["state"] for m in server.http.get("/v1/models").json()["data"]}


def _loads(server: Server, name: str) -> int:
    return len(re.findall(rf"\bloading {name}:", server.log()))


def _drained(server: Server, why: str) -> int:
    return server.log().count(f"takes no more requests ({why})")


def _until(true: Callable[[], Any], patience: float = 120) -> Any:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.02)
    raise TimeoutError


def test_two_dozen_first_requests_are_one_load(models: Server) -> None:
    before = _loads(models, "beta")
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: _ask(models, "beta"), range(24)))
    assert {a.status_code for a in answers} == {200}
    assert _loads(models, "beta") == before + 1
    assert _states(models) == {"alpha": "unloaded", "beta": "loaded", "gamma": "unloaded"}


def test_the_least_recently_used_makes_room_and_lists_are_no_use(models: Server) -> None:
    for name in ("alpha", "beta", "alpha"):
        assert _ask(models, name).status_code == 200
    models.http.get("/v1/models/beta")
    models.post("/api/show", {"model": "beta"})
    models.post("/tokenize", {"model": "beta", "prompt": "a b"})
    assert _ask(models, "gamma").status_code == 200
    assert set(_loaded(models)) == {"alpha", "gamma"}
    memory = models.http.get("/v1/status").json()["memory"]
    assert 0 < memory["reserved"] <= memory["limit"]
    assert "unloading beta (to make room for gamma)" in models.log()


def test_tokens_are_counted_without_a_load(models: Server) -> None:
    found = models.post("/tokenize", {"model": "gamma", "prompt": "a b"})
    assert found.status_code == 200 and found.json()["count"] == 2
    assert _loaded(models) == {}


def test_a_model_is_not_loaded_for_what_it_does_not_give(models: Server, shelf: Path) -> None:
    encoder_folders.encoder(shelf / "encoder")
    for path, body in (
        ("/v1/embeddings", {"model": "gamma", "input": "a"}),
        ("/rerank", {"model": "gamma", "query": "a", "documents": ["b"]}),
        ("/v1/completions", {"model": "encoder", "prompt": "a"}),
        ("/api/chat", {"model": "encoder", "messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = models.post(path, body)
        assert answer.status_code == 400 and " makes " in answer.text
    assert _loaded(models) == {}
    assert _ask(models, "gamma").status_code == 200
    assert models.post("/api/embed", {"model": "gamma", "keep_alive": 0}).status_code == 400
    assert models.http.get("/v1/models/gamma").json()["expires_at"]


def test_a_stream_begins_while_the_model_loads(models: Server, gate: Gate) -> None:
    body = {"model": "gamma", "prompt": "a b", "max_tokens": 2, "stream": True}
    begun = threading.Event()

    def read() -> str:
        with models.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            text = ""
            for line in response.iter_lines():
                begun.set()
                text += line + "\n"
            return text

    with ThreadPoolExecutor(1) as pool:
        with gate.closed():
            text = pool.submit(read)
            assert begun.wait(60)
            assert _loaded(models)["gamma"]["residency"] in ("wished", "loading")
        assert ": keep-alive" in text.result() and text.result().rstrip().endswith("[DONE]")


def test_a_load_goes_on_when_its_client_leaves(models: Server) -> None:
    body = {"model": "beta", "prompt": "a b", "max_tokens": 2, "stream": True}
    with models.http.stream("POST", "/v1/completions", json=body):
        pass
    _until(lambda: _states(models)["beta"] == "loaded")
    _until(lambda: not _loaded(models)["beta"]["requests"])


def test_an_engine_killed_while_it_loads_is_started_again(models: Server, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as pool:
        with gate.closed():
            answer = pool.submit(_ask, models, "beta")
            pid = _until(lambda: (_loaded(models).get("beta") or {}).get("engine_pid"))
            os.kill(pid, signal.SIGKILL)
        assert answer.result().status_code == 200


def test_unloading_gives_the_memory_back(models: Server) -> None:
    assert _ask(models, "alpha").status_code == 200
    pid = _loaded(models)["alpha"]["engine_pid"]
    assert Path(f"/proc/{pid}").exists()
    card = models.http.post("/v1/models/alpha/unload").json()
    assert card["state"] == "unloaded" and not Path(f"/proc/{pid}").exists()
    assert models.http.get("/v1/status").json()["memory"]["reserved"] == 0
    assert models.http.get("/health").status_code == 200
    assert _ask(models, "alpha").status_code == 200


def test_a_busy_model_is_unloaded_when_it_has_answered(models: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert _ask(models, "alpha").status_code == 200
        before = _drained(models, "asked to")
        with held(_loaded(models)["alpha"]["engine_pid"]):
            answer = pool.submit(_ask, models, "alpha", max_tokens=100)
            _until(lambda: _loaded(models)["alpha"]["requests"])
            unloaded = pool.submit(models.http.post, "/v1/models/alpha/unload")
            _until(lambda: _drained(models, "asked to") > before)
        assert unloaded.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 100


def test_a_time_to_live_is_kept_to(models: Server) -> None:
    assert _ask(models, "alpha", ttl=3600).status_code == 200
    assert models.http.get("/v1/models/alpha").json()["expires_at"]
    assert _ask(models, "alpha", ttl=0.5).status_code == 200
    _until(lambda: not _loaded(models))
    assert _ask(models, "beta", ttl=0).status_code == 200
    _until(lambda: not _loaded(models))
    assert "unused for its time to live" in models.log()


def test_ollama_loads_and_unloads_with_empty_requests(models: Server) -> None:
    for path, empty in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
        loaded = models.post(path, {"model": "beta:latest", "keep_alive": "10m", **empty}).json()
        assert loaded["done_reason"] == "load"
        (listed,) = models.http.get("/api/ps").json()["models"]
        assert listed["name"] == "beta:latest" and listed["size"] > 0
        assert not listed["expires_at"].startswith("9999")
        gone = models.post(path, {"model": "beta", "keep_alive": 0, **empty}).json()
        assert gone["done_reason"] == "unload"
        _until(lambda: models.http.get("/api/ps").json()["models"] == [])


def test_pinned_models_stay_and_what_has_no_room_beside_them_is_told_so(models: Server) -> None:
    for name in ("alpha", "beta"):
        assert models.post(f"/v1/models/{name}/pin", {}).json()["pinned"]
        assert _ask(models, name).status_code == 200
    refused = _ask(models, "gamma")
    assert refused.status_code == 507
    error = refused.json()["error"]
    assert error["code"] == "insufficient_memory"
    assert re.search(r"needs at least \d+ MB .*760|797 MB.*alpha .*pinned", error["message"])
    assert set(_loaded(models)) == {"alpha", "beta"}
    models.post("/v1/models/alpha/pin", {"pin": False})
    assert _ask(models, "gamma").status_code == 200


def test_a_model_that_can_never_fit_is_refused_with_figures(models: Server, shelf: Path) -> None:
    folder = shelf / "huge"
    folder.mkdir()
    for file in (shelf / "alpha").glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensor = {"dtype": "BF16", "shape": [69, 10**9], "data_offsets": [0, 138 * 10**9]}
    head = json.dumps({"w": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + 138 * 10**9)  # nothing of it is written to the disk
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/api/generate", {"prompt": "a"}),
        ("/models/load", {}),
    ):
        answer = models.post(path, {"model": "huge", **body})
        assert answer.status_code == 507
        assert "152.1 GB" in answer.text and "797 MB" in answer.text


def test_a_load_that_fails_is_remembered_and_leaves_the_others_alone(
    models: Server, shelf: Path
) -> None:
    assert _ask(models, "alpha").status_code == 200
    broken = shelf / "broken"
    broken.mkdir(exist_ok=True)
    for file in (shelf / "beta").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    body = {"model": "broken", "prompt": "a b", "stream": True}
    with models.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        text = response.read().decode()
    assert '"error"' in text and "[DONE]" not in text
    again = _ask(models, "broken")
    assert again.status_code == 503 and int(again.headers["retry-after"]) > 1
    assert "cannot be loaded" in again.json()["error"]["message"]
    assert _states(models)["broken"] == "failed"
    assert _ask(models, "alpha").status_code == _ask(models, "beta").status_code == 200
    assert models.http.get("/health").status_code == 200
    (broken / "config.json").write_text(json.dumps(config))
    assert models.http.post("/v1/models/broken/load").json()["state"] == "loaded"
    assert _ask(models, "broken").status_code == 200
    models.http.post("/v1/models/broken/unload")


def test_weights_that_cannot_be_read_are_told_at_once(models: Server, shelf: Path) -> None:
    folder = shelf / "cut"
    folder.mkdir()
    for file in (shelf / "alpha").glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    for _ in range(2):
        answer = _ask(models, "cut")
        assert answer.status_code == 503 and "not a sound safetensors file" in answer.text
    assert _states(models)["cut"] == "broken"


@pytest.mark.parametrize(
    "name",
    ["../alpha", "/etc", "..", ".", "alpha/../beta", "a\0b", "x" * 5000, "модель", "alpha/", "~"],
)
def test_hostile_names_are_not_found(models: Server, shelf: Path, name: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/models/load", {}),
        ("/models/unload", {}),
    ):
        answer = models.post(path, {"model": name, **body})
        assert answer.status_code == 404 and "alpha" in answer.text
        assert len(answer.text) < 1000
    assert _loaded(models) == {}


@pytest.mark.parametrize("what", ["load", "unload", "pin"])
def test_an_empty_name_is_no_model(models: Server, what: str) -> None:
    assert models.post(f"/v1/models//{what}", {}).status_code == 400
    assert _loaded(models) == {}


def test_too_many_who_wait_are_sent_away(models: Server, gate: Gate) -> None:
    with ThreadPoolExecutor(60) as pool:
        with gate.closed():
            asked = [pool.submit(_ask, models, "alpha") for _ in range(60)]
            _until(lambda: sum(a.done() for a in asked) == 30)
        answers = [a.result() for a in asked]
    refused = [a for a in answers if a.status_code != 200]
    assert [a.status_code for a in refused] == [503] * 30
    assert all(int(a.headers["retry-after"]) > 0 for a in refused)


def test_a_model_waits_no_longer_than_its_turn_while_others_are_in_use(models: Server) -> None:
    stop = threading.Event()

    def use(name: str, tokens: int) -> set[int]:
        seen = set()
        while not stop.is_set():
            seen.add(_ask(models, name, max_tokens=tokens).status_code)
        return seen

    with ThreadPoolExecutor(13) as pool:
        users = [pool.submit(use, n, 40 + 31 * k) for k in range(6) for n in ("alpha", "beta")]
        _until(
            lambda: {n for n, s in _states(models).items() if s == "loaded"} >= {"alpha", "beta"}
        )
        before = _drained(models, "to make room for gamma")
        engines = [m["engine_pid"] for m in _loaded(models).values()]
        with held(engines[0]), held(engines[1]):
            _until(lambda: all(m["requests"] for m in _loaded(models).values()))
            answer = pool.submit(_ask, models, "gamma")
            _until(lambda: _drained(models, "to make room for gamma") > before)
            stop.set()
        assert answer.result().status_code == 200
        assert {status for user in users for status in user.result()} == {200}


def test_adapters_that_come_later_count_as_memory_of_their_model(
    models: Server, tmp_path: Path
) -> None:
    folder = write_mlx(tmp_path / "a", random_pairs({"model.layers.0.self_attn.q_proj": (32, 32)}))
    assert _ask(models, "alpha").status_code == 200
    before = _loaded(models)["alpha"]["reserved_bytes"]
    body = {"lora_name": "sql", "lora_path": str(folder), "base_model_name": "alpha"}
    assert models.post("/v1/load_lora_adapter", body).status_code == 200
    told = _loaded(models)["alpha"]
    assert told["reserved_bytes"] == before + told["adapter_bytes"] > before
    elsewhere = models.post("/v1/load_lora_adapter", body | {"base_model_name": "beta"})
    assert elsewhere.status_code == 400 and "is taken" in elsewhere.text
    assert models.post("/v1/unload_lora_adapter", body).status_code == 200
    _until(lambda: _loaded(models)["alpha"]["reserved_bytes"] == before)


def test_an_adapter_that_goes_while_its_model_loads_is_not_found(
    models: Server, gate: Gate, tmp_path: Path
) -> None:
    folder = write_mlx(tmp_path / "a", random_pairs({"model.layers.0.self_attn.q_proj": (32, 32)}))
    body = {"lora_name": "sql", "lora_path": str(folder), "base_model_name": "alpha"}
    assert models.post("/v1/load_lora_adapter", body).status_code == 200
    assert models.http.post("/v1/models/sql/unload").json()["state"] == "unloaded"
    with ThreadPoolExecutor(1) as pool:
        with gate.closed():
            answer = pool.submit(_ask, models, "sql")
            _until(lambda: "alpha" in _loaded(models))
            assert models.post("/v1/unload_lora_adapter", body).status_code == 200
        # It may have been handed over before that, but is never answered by the bare model.
        told = answer.result()
        assert told.status_code == 404 or told.json()["model"] == "sql"


def test_loads_and_unloads_are_counted(models: Server) -> None:
    assert _ask(models, "alpha").status_code == 200
    text = models.http.get("/metrics").text
    assert re.search(r'millrace_model_loads_total\{model="alpha",outcome="ok"\} [1-9]', text)
    assert re.search(r'millrace_model_unloads_total\{model="alpha",reason="asked"\} [1-9]', text)
    assert re.search(r"millrace_memory_reserved_bytes [1-9]", text)
