"""Overload: what fits is served, the rest is told so at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import scrape, tiny_folder
from conftest import PATIENCE, Server, held, until

RUNNING, QUEUE, CLIENTS = 8, 32, 200
BODY = {"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
GROWTH = 1.3
BUFFERS = 256 * 1024
"""Kilobytes of freed buffers that MLX may keep for reuse on a CPU. Steps with guesses have many sizes,
so these fill up over the waves; without guesses memory stays where it is."""


async def _wave(server: Server) -> list[httpx.Response]:
    """All clients at once; their answers in the order in which they ended.

    Connections are open beforehand and speak plain HTTP: a client library takes seconds of its own
    for so many requests. No answer ends before all clients have come: the engine is held meanwhile.
    """
    ended: list[httpx.Response] = []
    engine = server.engine

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = await reader.read()
        ended.append(_parsed(answer))
        writer.close()

    pairs = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CLIENTS)]
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        with held(engine):
            for reader, writer in pairs:
                writer.write(_request(BODY))
                group.create_task(client(reader, writer))
            while len(ended) < CLIENTS - RUNNING - QUEUE:
                await asyncio.sleep(0.01)
    return ended


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + content


def _parsed(answer: bytes) -> httpx.Response:
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    return httpx.Response(int(first.split()[1]), headers=headers, content=content)


def _check(ended: list[httpx.Response]) -> None:
    refusals = CLIENTS - RUNNING - QUEUE
    codes = [r.status_code for r in ended]
    assert (codes.count(200), codes.count(429)) == (RUNNING + QUEUE, refusals)
    # At once: every refusal was heard before any answer had ended.
    assert set(codes[:refusals]) == {429}
    for refused in ended[:refusals]:
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert "--max-queue" in error["message"]
    for served in ended[refusals:]:
        assert served.json()["usage"]["completion_tokens"] == BODY["max_tokens"]


def _memory(server: Server) -> dict[str, int]:
    """Resident kilobytes of both processes."""
    pids = {"front": server.process.pid, "engine": server.status()["engine_pid"]}
    return {
        name: int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True).stdout)
        for name, pid in pids.items()
    }


@pytest.mark.parametrize(
    ("more", "reused"), [((), BUFFERS), (("--speculate", "0"), 0)], ids=["guessing", "plain"]
)
def test_two_hundred_at_once(
    start: Callable[..., Server],
    tmp_path: Path,
    default_model: Path,
    more: tuple[str, ...],
    reused: int,
) -> None:
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    bounds = ("--max-running", str(RUNNING), "--max-queue", str(QUEUE))
    server = start(str(model), *bounds, *more).wait_ready()
    memory = [_memory(server)]
    for _ in range(3):
        _check(asyncio.run(_wave(server)))
        memory.append(_memory(server))
    # The first wave loads what is loaded once: the vocabulary, buffers.
    for name, before in memory[1].items():
        allowed = GROWTH * before + (reused if name == "engine" else 0)
        assert max(m[name] for m in memory[2:]) < allowed, memory
    _is_idle(server)
    answer = server.post("/v1/completions", BODY | {"max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    requests = "millrace_requests_total"
    assert scrape.total(server, requests, outcome="ok") == 3 * (RUNNING + QUEUE) + 1
    assert server.status()["restarts"] == 0


def _is_idle(server: Server) -> None:
    assert until(lambda: server.status()["requests"] == [])
    for gauge in ("running", "queued", "kv_bytes"):
        assert until(lambda name=gauge: scrape.total(server, f"millrace_{name}") == 0)  # type: ignore[misc]


def test_a_request_of_several_answers_counts_as_several(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    server = start(str(model), "--max-running", "2", "--max-queue", "2").wait_ready()
    body = BODY | {"max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as first:
        lines = first.iter_lines()
        next(lines)

        def ask(**more: Any) -> int:
            short = BODY | {"max_tokens": 1} | more
            return server.post("/v1/completions", short).status_code

        with held(server.engine):
            assert ask(n=4) == 429
            assert ask(prompt=["a", "b", "c", "d"]) == 429
        assert ask(n=3) == 200
        assert ask(prompt=["a", "b", "c"]) == 200


def test_a_caller_that_fills_the_queue_refuses_nobody_else(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    keys = ("--api-key", "one", "--api-key", "two")
    server = start(str(model), *keys, "--max-running", "2", "--max-queue", "4").wait_ready()
    server.http.headers["authorization"] = "Bearer one"

    async def ask(client: httpx.AsyncClient, key: str) -> int:
        header = {"authorization": f"Bearer {key}"}
        answer = await client.post("/v1/completions", json=BODY, headers=header)
        return answer.status_code

    async def scene() -> None:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client,
            asyncio.TaskGroup() as group,
        ):
            with held(server.engine):
                first = [group.create_task(ask(client, "one")) for _ in range(7)]
                while not any(t.done() for t in first):
                    await asyncio.sleep(0.01)
                second = [group.create_task(ask(client, "two")) for _ in range(4)]
                while not any(t.done() for t in second):
                    await asyncio.sleep(0.01)
        assert sorted(t.result() for t in first) == [200] * 6 + [429]
        assert sorted(t.result() for t in second) == [200] * 3 + [429]

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))


def test_a_callers_flood_does_not_keep_a_neighbour_waiting(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    keys = ("--api-key", "one", "--api-key", "two")
    server = start(str(model), *keys, "--max-running", "2", "--max-queue", "64").wait_ready()
    ended: list[str] = []

    async def ask(client: httpx.AsyncClient, key: str, tokens: int, priority: int) -> None:
        body = BODY | {"max_tokens": tokens, "priority": priority}
        header = {"authorization": f"Bearer {key}"}
        answer = await client.post("/v1/completions", json=body, headers=header)
        assert answer.status_code == 200
        ended.append(key)

    async def scene() -> None:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(16):
                group.create_task(ask(client, "one", 600, 1000))
            while not ended:
                await asyncio.sleep(0.01)
            await ask(client, "two", 10, 0)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert ended.index("two") < 10
