"""Models whose engines cannot be started again: only they are unavailable, with the reason, and for as long
as it lasts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import poisoned
import pytest
from conftest import Server, until

HELLO = [{"role": "user", "content": "a b"}]
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
MISSING = "is missing"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    poisoned.make(folder / "kept", default_model)
    shutil.copytree(folder / "kept", folder / "lost")
    return folder


@pytest.fixture(scope="module")
def pair(shelf: Path) -> Iterator[Server]:
    """A server of two models."""
    server = Server(
        str(shelf / "kept"), str(shelf / "lost"), "--trust-remote-code", "--store", "none"
    ).wait_ready()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def alone(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one model."""
    folder = Path(shutil.copytree(shelf / "kept", tmp_path_factory.mktemp("alone") / "lost"))
    server = Server(str(folder), "--trust-remote-code", "--store", "none").wait_ready()
    server.folder = folder  # type: ignore[attr-defined]
    yield server
    server.stop()


def _model(server: Server, name: str = "lost") -> dict[str, Any]:
    listed = server.http.get("/v1/status").json()["models"]
    return next((m for m in listed if m["name"] == name), {})


def _kill(server: Server, name: str = "lost") -> None:
    os.kill(_model(server, name)["engine_pid"], signal.SIGKILL)


@contextmanager
def _away(folder: Path) -> Iterator[None]:
    aside = folder.with_name("aside")
    folder.rename(aside)
    try:
        yield
    finally:
        aside.rename(folder)


def _stream(server: Server, begun: Callable[[], object], **more: Any) -> tuple[int, str, bool]:
    """How many pieces of text came, the error that ended them, and whether the stream said it was done."""
    pieces, error, done = 0, "", False
    body = poisoned.healthy(0, 400) | {"model": "lost", "stream": True} | more
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            done |= line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = error or event.get("error", {}).get("message", "")
                pieces += "choices" in event
                begun()
    return pieces, error, done


def _answers(server: Server, name: str = "lost") -> bool:
    return server.post("/v1/completions", SHORT | {"model": name}).status_code == 200


def _assert_refused(server: Server, words: str) -> None:
    """Every protocol says at once why, in its own shape."""
    for path, body in (
        ("/v1/completions", SHORT),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "a b"}),
        ("/api/chat", {"messages": HELLO}),
    ):
        answer = server.post(path, body | {"model": "lost"})
        assert answer.status_code == 503, (path, answer.text)
        error = answer.json()["error"]
        assert words in (error if path.startswith("/api/") else error["message"])


def _assert_lost(server: Server, words: str) -> None:
    status = _model(server)
    assert (status["state"], status["residency"]) == ("failed", "failed")
    assert words in status["error"] and status["engine_pid"] is None
    card = server.http.get("/v1/models/lost").json()
    assert card["state"] in ("broken", "failed") and words in card["error"]


def _broken(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"{")


def _unloadable(folder: Path) -> None:
    """What only an engine finds out."""
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


def test_one_of_two_whose_folder_is_gone(pair: Server, shelf: Path) -> None:
    begun, folder = threading.Event(), shelf / "lost"
    with ThreadPoolExecutor() as pool, poisoned.hold(folder):
        stream = pool.submit(_stream, pair, begun.set)
        assert begun.wait(120)
        with _away(folder):
            _kill(pair)
            pieces, error, done = stream.result(120)
            assert pieces and MISSING in error and not done, "an error event, and no [DONE]"
            assert until(lambda: _model(pair)["residency"] == "failed")
            _assert_lost(pair, MISSING)
            _assert_refused(pair, MISSING)
            health = pair.http.get("/health")
            assert health.status_code == 200, health.text
            assert health.json()["models"] == {"kept": "ready", "lost": "failed"}
            assert _answers(pair, "kept")
    assert _answers(pair), "its folder is back"
    assert _model(pair)["state"] == "ready" and _model(pair)["error"] is None
    assert pair.http.get("/v1/models/lost").json()["state"] == "loaded"


@pytest.mark.parametrize(
    ("change", "words"), [(_broken, "not valid JSON"), (_unloadable, "cannot be loaded")]
)
def test_one_of_two_whose_files_are_broken(
    pair: Server, shelf: Path, change: Callable[[Path], None], words: str
) -> None:
    assert _answers(pair)
    config = shelf / "lost" / "config.json"
    sound = config.read_bytes()
    try:
        change(shelf / "lost")
        _kill(pair)
        assert until(lambda: _model(pair).get("residency") == "failed")
        _assert_lost(pair, words)
        _assert_refused(pair, words)
        assert pair.http.get("/health").status_code == 200
        assert _answers(pair, "kept")
    finally:
        config.write_bytes(sound)
    assert _answers(pair), "its files are sound again"


def test_the_only_one_whose_folder_is_gone(alone: Server) -> None:
    folder: Path = alone.folder  # type: ignore[attr-defined]
    with _away(folder):
        _kill(alone)
        assert until(lambda: _model(alone).get("residency") == "failed")
        _assert_refused(alone, MISSING)
        _assert_lost(alone, MISSING)
        health = alone.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert MISSING in health.json()["error"]
    assert until(lambda: alone.http.get("/health").status_code == 200), "by itself"
    assert _answers(alone)
