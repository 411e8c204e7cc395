"""Clients that go away, at any moment: their work is let go of, and the server is as before."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from api import scrape, tiny_folder
from conftest import PATIENCE, Server, until

CLIENTS, AT_ONCE = 500, 50
GAUGES = ("millrace_running", "millrace_queued", "millrace_kv_bytes")
REFERENCE = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Storm:
    """Clients that leave before their answer is whole, and what /v1/status says meanwhile."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self.phases: set[str] = set()
        self.known: set[str] = set()
        """Requests that the server was seen to have."""
        self.whole = 0
        """Answers that came to their end all the same."""

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE, trust_env=False) as http:
            gate = asyncio.Semaphore(AT_ONCE)
            watcher = asyncio.create_task(self._watch(http))
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._client(http, gate, self._body(), self._patience()))
            watcher.cancel()

    def _body(self) -> dict[str, Any]:
        words = self._random.choice((2, 20, 3000))
        return {
            "prompt": f"{self._random.random()} " + "mill " * words,
            "max_tokens": self._random.choice((50, 3000)),
            "n": self._random.choice((1, 1, 2)),
            "ignore_eos": True,
            "stream": self._random.random() < 0.5,
        }

    def _patience(self) -> float:
        """Seconds; half of the clients leave while they wait, the others see some of the answer."""
        return self._random.choice((self._random.uniform(0, 0.2), self._random.uniform(0.2, 2)))

    async def _client(
        self, http: httpx.AsyncClient, gate: asyncio.Semaphore, body: dict[str, Any], stay: float
    ) -> None:
        url = f"{self._server.url}/v1/completions"
        async with gate:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stay), http.stream("POST", url, json=body) as response:
                    assert response.status_code == 200
                    async for _ in response.aiter_bytes():
                        pass
                self.whole += 1

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while True:
            status = (await http.get(f"{self._server.url}/v1/status")).json()
            self.phases |= {r["phase"] for r in status["models"][0]["requests"]}
            self.known |= {r["id"] for r in status["models"][0]["requests"]}
            await asyncio.sleep(0.02)


def _gauges(server: Server) -> dict[str, float]:
    return {name: scrape.total(server, name) for name in GAUGES}


def _outcomes(server: Server) -> list[float]:
    """How many requests came to their end so far, and how many clients left before."""
    return [
        scrape.total(server, "millrace_requests_total", outcome=outcome)
        for outcome in ("ok", "disconnected")
    ]


def _while_running(server: Server) -> dict[str, float]:
    """The gauges while one known request runs: what the engine itself holds for it."""
    url = f"{server.url}/v1/completions"
    for _ in range(10):
        body = REFERENCE | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            for _ in range(20):
                next(lines)
            seen = _gauges(server)
            for _ in lines:
                pass
        if seen["millrace_running"] and seen["millrace_kv_bytes"]:  # else it was over before
            break
    return seen


def test_five_hundred_clients_that_go_away(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    # Without guesses, a known line of the answer is a known length of the row.
    options = ("--max-running", "8", "--prefill-chunk", "64", "--speculate", "0")
    server = start(str(model), *options).wait_ready()
    expected = server.post("/v1/completions", REFERENCE).json()["choices"]
    at_rest, with_one = _gauges(server), _while_running(server)
    assert set(at_rest.values()) == {0}
    assert with_one["millrace_running"] == 1

    before = _outcomes(server)
    storm = Storm(server, seed=1)
    asyncio.run(storm.run())
    assert storm.phases == {"queued", "prefill", "decode"}
    assert until(lambda: server.status()["requests"] == []), server.status()["requests"]
    whole, left = (now - was for now, was in zip(_outcomes(server), before, strict=True))
    # On a busy machine some are gone before their request has been read: who was seen is accounted for.
    assert whole >= storm.whole and left >= len(storm.known) - whole, (whole, left, storm.whole)
    assert left > AT_ONCE
    assert until(lambda: _gauges(server) == at_rest), _gauges(server)
    # The gauges above are told by the front; beside a known request the engine tells its own.
    assert _while_running(server) == with_one
    assert server.post("/v1/completions", REFERENCE).json()["choices"] == expected
    assert server.status()["restarts"] == 0


def test_the_last_to_leave_empties_the_gauges(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    """A step that was on its way when the client left must not be the last word."""
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    server = start(str(model)).wait_ready()
    body = REFERENCE | {"stream": True, "max_tokens": 4000}
    for _ in range(20):
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            next(response.iter_lines())
        assert until(lambda: server.status()["requests"] == [])
        assert until(lambda: set(_gauges(server).values()) == {0}), _gauges(server)
