"""Broken model folders on a server that finds its models: each is its own trouble alone.

They are listed as broken with the reason, asking for one is an error that says it, and the sound ones
are listed and served as before. No read of them waits or takes more than a bounded amount.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api import tiny_folder
from conftest import Server
from models import broken_folders
from models.broken_folders import BROKEN

HELLO = [{"role": "user", "content": "a b"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "a b"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "a b"},
    "/api/embed": {"input": "a b"},
    "/api/show": {},
    "/v1/embeddings": {"input": "a b"},
    "/tokenize": {"prompt": "a b"},
    "/models/load": {},
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    return broken_folders.make(folder, tiny_folder.make(folder / "sound", default_model))


@pytest.fixture(scope="module")
def server(shelf: Path) -> Iterator[Server]:
    home = shelf.parent / "home"
    env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    running = Server(
        str(shelf / "sound"), "--model-dir", str(shelf), "--store", "none", env=env, only=False
    ).wait_ready()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _others_are_served(server: Server) -> Iterator[None]:
    yield
    answer = server.post("/v1/completions", {"model": "sound", "prompt": "a b", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert server.http.get("/health").status_code == 200


def _listed(server: Server, path: str, key: str, **headers: str) -> dict[str, dict[str, Any]]:
    answer = server.http.get(path, headers=headers)
    assert answer.status_code == 200, answer.text
    listed = answer.json()["models" if path != "/v1/models" else "data"]
    return {entry[key].removesuffix(":latest"): entry for entry in listed}


@pytest.mark.parametrize(
    ("path", "key", "headers"),
    [
        ("/v1/models", "id", {}),
        ("/v1/models", "id", {"anthropic-version": "2023-06-01"}),
        ("/api/tags", "name", {}),
        ("/v1/library", "name", {}),
    ],
)
def test_lists_have_them_with_the_reason(
    server: Server, path: str, key: str, headers: dict[str, str]
) -> None:
    found = _listed(server, path, key, **headers)
    assert set(found) == {*BROKEN, "sound"}
    assert found["sound"].get("error") is None
    for name, (_, words) in BROKEN.items():
        assert words in found[name]["error"], name
        if path == "/v1/models":
            assert found[name]["state"] == "broken"


def test_sound_ones_are_listed_as_before(server: Server) -> None:
    card = _listed(server, "/v1/models", "id")["sound"]
    assert (card["state"], card["context_window"]) == ("loaded", tiny_folder.WINDOW)
    about = _listed(server, "/v1/library", "name")["sound"]
    assert about["fits"] and about["architecture"] == "llama" and about["disk_bytes"] > 0
    tag = _listed(server, "/api/tags", "name")["sound"]
    assert tag["details"]["family"] == "llama" and tag["size"] == about["disk_bytes"]


def _message(path: str, answer: Any) -> str:
    body = answer.json()
    if path.startswith("/api/"):
        return str(body["error"])
    if path == "/v1/messages":
        assert body["type"] == "error"
    return str(body["error"]["message"])


@pytest.mark.parametrize("name", BROKEN)
def test_asking_for_one_says_what_is_wrong(server: Server, name: str) -> None:
    answer = server.post("/v1/completions", {"model": name, "prompt": "a b"})
    assert answer.status_code == 503, answer.text
    assert BROKEN[name][1] in _message("/v1/completions", answer)
    again = server.post("/v1/completions", {"model": name, "prompt": "a b"})
    assert again.status_code == 503 and BROKEN[name][1] in _message("/v1/completions", again)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("name", ["config-nested", "tensor-beyond", "config-pipe"])
def test_every_protocol_says_it_in_its_own_shape(server: Server, path: str, name: str) -> None:
    answer = server.post(path, {"model": name, **ENDPOINTS[path]})
    assert answer.status_code == 503, answer.text
    assert BROKEN[name][1] in _message(path, answer)
    loaded = server.http.post(f"/v1/models/{name}/load")
    assert loaded.status_code == 503 and BROKEN[name][1] in loaded.text
    card = server.http.get(f"/v1/models/{name}")
    assert card.status_code == 200 and BROKEN[name][1] in card.json()["error"]


def test_a_stream_is_refused_before_it_begins(server: Server) -> None:
    answer = server.post(
        "/v1/chat/completions", {"model": "bits-text", "messages": HELLO, "stream": True}
    )
    assert answer.status_code == 503 and "quantization.bits" in answer.text


def test_one_that_was_mended_is_loaded_on_the_next_request(server: Server, shelf: Path) -> None:
    folder = Path(shutil.copytree(shelf / "head-words", shelf / "mended"))
    try:
        body = {"model": "mended", "prompt": "a b", "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 503
        shutil.copy(shelf / "sound" / "model.safetensors", folder)
        assert server.post("/v1/completions", body).status_code == 200
    finally:
        server.http.post("/v1/models/mended/unload")
        shutil.rmtree(folder)


def test_a_missing_model_is_told_the_sound_ones_alone(server: Server) -> None:
    answer = server.post("/v1/completions", {"model": "nowhere", "prompt": "a"})
    assert answer.status_code == 404 and "Models served: sound." in answer.text
