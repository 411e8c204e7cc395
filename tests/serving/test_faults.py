"""Faults stay where they are: poisoned requests end, streams beside them go on token for token."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import poisoned
import pytest
from conftest import PATIENCE, Server, until

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return poisoned.make(tmp_path_factory.mktemp("poisoned") / "model", default_model)


def _options(folder: Path) -> list[str]:
    return [str(folder), "--name", "tiny", "--trust-remote-code"]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Server]:
    server = Server(*_options(folder)).wait_ready()
    yield server
    server.stop()


def _read(server: Server, body: dict[str, Any], begun: Callable[[], object]) -> tuple[str, str]:
    """A stream's text, and the error that ended it."""
    text, error = "", ""
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    error = event["error"]["message"]
                else:
                    text += event["choices"][0]["text"]
                    begun()
    return text, error


TOKENS = 400
_undisturbed: dict[tuple[int, int], tuple[str, str]] = {}
"""What a healthy stream says when nobody disturbs it, by its number and length: on every server."""


class Streams:
    """Healthy streams, and what they say when nobody disturbs them."""

    def __init__(self, server: Server, count: int, tokens: int = TOKENS) -> None:
        self.server = server
        self.bodies = [poisoned.healthy(n, tokens) for n in range(count)]
        self.pool = ThreadPoolExecutor(count + 1)
        self._begun = threading.Semaphore(0)
        keys = [(n, tokens) for n in range(count)]
        if not _undisturbed.keys() >= set(keys):
            _undisturbed.update(zip(keys, [r.result() for r in self._start()], strict=True))
        self.undisturbed = [_undisturbed[key] for key in keys]
        self._begun = threading.Semaphore(0)
        self.running: list[Future[tuple[str, str]]] = []

    def _start(self) -> list[Future[tuple[str, str]]]:
        return [
            self.pool.submit(_read, self.server, body, self._begun.release) for body in self.bodies
        ]

    def start(self) -> Streams:
        self.running = self._start()
        for _ in range(3 * len(self.running)):
            self._begun.acquire()
        return self

    def check(self) -> None:
        assert [r.result() for r in self.running] == self.undisturbed
        assert all(text and not error for text, error in self.undisturbed)


def _wait(server: Server, met: Callable[[], bool]) -> None:
    assert until(met), server.log()[-3000:]


def test_five_poisoned_requests_beside_eight_streams(shared: Server) -> None:
    streams = Streams(shared, 8).start()
    before = shared.status()["restarts"]
    poison = [poisoned.in_prompt(poisoned.ABORT, 30 + n) for n in range(5)]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda body: shared.post("/v1/completions", body), poison))
    assert [a.status_code for a in answers] == [503] * 5
    assert all("engine died 2 times" in a.json()["error"]["message"] for a in answers)
    streams.check()
    assert shared.status()["restarts"] - before <= 20
    shared.wait_ready()


@pytest.mark.parametrize("token", [poisoned.EXIT, poisoned.KILL])
def test_a_request_that_dies_of_its_own_answer(shared: Server, token: int) -> None:
    streams = Streams(shared, 3).start()
    answer = shared.post("/v1/completions", poisoned.in_answer(token))
    streams.check()
    assert answer.status_code == 503
    assert "engine died" in answer.json()["error"]["message"]
    assert shared.wait_ready().status()["requests"] == []


def test_kills_from_outside_fail_nobody(shared: Server) -> None:
    streams = Streams(shared, 8, 600).start()
    for _ in range(6):
        before = shared.status()["restarts"]
        shared.kill_engine()
        shared.restarted(before)
        _wait(shared, lambda: all(r["phase"] != "queued" for r in shared.status()["requests"]))
    streams.check()


def test_what_no_message_can_carry_leaves_nothing_behind_for_the_next_death(shared: Server) -> None:
    hello = poisoned.healthy(1, 5)
    for hostile in ({"top_k": 1 << 64}, {"min_tokens": 1 << 64}, {"stop_token_ids": [1 << 70]}):
        assert shared.post("/v1/completions", hello | hostile).status_code == 400
    assert shared.status()["requests"] == []
    before = shared.status()["restarts"]
    shared.kill_engine()
    shared.restarted(before)
    assert shared.post("/v1/completions", hello).status_code == 200


def test_sockets_that_were_tidied_away(start: Start, folder: Path, tmp_path: Path) -> None:
    server = start(*_options(folder), env={"TMPDIR": str(tmp_path)}).wait_ready()
    streams = Streams(server, 2)
    with poisoned.hold(folder):
        streams.start()
        for entry in tmp_path.iterdir():
            shutil.rmtree(entry)
        server.kill_engine()
        server.restarted()
    streams.check()
    assert server.health() == {"status": "ready", "models": {"tiny": "ready"}}
    assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
def test_no_file_descriptors_for_a_while(start: Start, folder: Path) -> None:
    server = start(*_options(folder)).wait_ready()
    streams = Streams(server, 2)
    pid = server.process.pid
    with poisoned.hold(folder):
        streams.start()
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        engine = server.engine
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used - 4, hard))
        os.kill(engine, signal.SIGKILL)
        _wait(server, lambda: "cannot be started" in server.health().get("error", ""))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    streams.check()
    assert server.http.get("/health").status_code == 200


def test_a_model_that_cannot_be_loaded_still_ends_the_first_start(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / "model.safetensors").write_bytes(b"nothing")
    server = start(*_options(model))
    assert server.process.wait(PATIENCE) == 1
    assert "not a sound safetensors file" in " ".join(server.log().split())
