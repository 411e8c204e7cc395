"""Request bodies: how much memory they may take while they arrive, how slow they may be, their coding."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api.test_hosts import _app
from api.test_http1 import Quick, _exchange, serving
from conftest import PATIENCE, Server, until
from starlette.requests import ClientDisconnect

from millrace.api.body_budget import SMALL, BodyBudget, budget_for
from millrace.api.http1 import HttpProtocol
from millrace.api.reader_watch import WatchedProtocol
from millrace.caller import Departure, current_caller, current_departure
from millrace.config import ApiKey
from millrace.heap import HeapTrimmer, find_malloc_trim

MIB = 1 << 20
KEYS = (ApiKey(secret="sk-one"), ApiKey(secret="sk-two"))
PATHS = ["/v1/chat/completions", "/v1/messages", "/api/chat", "/embed", "/generate"]


def _head(length: int, *more: bytes, path: str = "/v1/completions", key: str = "sk-one") -> bytes:
    lines = [
        b"POST %b HTTP/1.1" % path.encode(),
        b"Host: localhost",
        b"Authorization: Bearer %b" % key.encode(),
        b"Content-Length: %d" % length,
        *more,
    ]
    return b"\r\n".join([*lines, b"", b""])


@pytest.fixture
def limited() -> Iterator[tuple[int, BodyBudget]]:
    """A server with room for two bodies of 1 MiB per caller, and three in total."""
    app = _app(max_body=MIB, api_keys=KEYS)
    budget = app.state.context.__dict__["bodies"] = BodyBudget(3 * MIB, 2 * MIB, patience=0.2)
    with serving(WatchedProtocol, app) as (port, _):
        yield port, budget


@contextlib.contextmanager
def _half_sent(port: int, *keys: str) -> Iterator[None]:
    """Connections that have sent half of a body of 1 MiB."""
    with contextlib.ExitStack() as stack:
        for key in keys:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(_head(MIB, key=key) + b"x" * (MIB // 2))
        yield


def _status(
    port: int, size: int, key: str, path: str = "/v1/completions"
) -> tuple[int, bytes, Any]:
    ask = _head(size, b"Connection: close", path=path, key=key)
    heard = _exchange(port, ask + b'{"a": "' + b"x" * (size - 9) + b'"}')
    head, _, body = heard.partition(b"\r\n\r\n")
    return int(head[9:12]), head.lower(), json.loads(body)


@pytest.mark.parametrize("path", PATHS)
def test_unfinished_bodies_of_one_caller_are_limited(
    limited: tuple[int, BodyBudget], path: str
) -> None:
    port, budget = limited
    with _half_sent(port, "sk-one", "sk-one"):
        assert until(lambda: budget.used == 2 * MIB)
        status, head, body = _status(port, MIB, "sk-one", path)
        assert status == 429, body
        assert b"retry-after: 1\r\n" in head
        assert "this caller" in json.dumps(body)
        if path == "/v1/messages":
            assert body["error"]["type"] == "rate_limit_error"
        small, _, _ = _status(port, SMALL, "sk-one", path)
        assert small not in (429, 503), "small bodies are never refused"
        other, _, _ = _status(port, MIB, "sk-two", path)
        assert other not in (429, 503), "another caller has room"
    assert until(lambda: budget.used == 0)


def test_unfinished_bodies_of_all_callers_are_limited(limited: tuple[int, BodyBudget]) -> None:
    port, budget = limited
    with _half_sent(port, "sk-one", "sk-one", "sk-two"):
        assert until(lambda: budget.used == 3 * MIB)
        status, _, body = _status(port, MIB, "sk-two")
        assert status == 429 and "The server is reading" in body["error"]["message"]
    assert until(lambda: budget.used == 0)
    assert _status(port, MIB, "sk-two")[0] not in (429, 503)


def test_a_chunked_body_is_counted_once_it_is_large(limited: tuple[int, BodyBudget]) -> None:
    port, budget = limited
    ask = _head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    piece = b"%x\r\n" % SMALL + b"x" * SMALL + b"\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(ask + piece)
        time.sleep(0.2)
        assert budget.used == 0
        connection.sendall(piece)
        assert until(lambda: budget.used == MIB)
    assert until(lambda: budget.used == 0)


def test_the_rest_of_a_refused_body_is_not_waited_for(limited: tuple[int, BodyBudget]) -> None:
    port, budget = limited
    with _half_sent(port, "sk-one", "sk-one"):
        assert until(lambda: budget.used == 2 * MIB)
        heard = _exchange(port, _head(MIB) + b"x" * 1000)  # until the server closes
    assert heard.startswith(b"HTTP/1.1 429 ")
    assert b"connection: close" in heard.lower()


def test_a_client_that_waits_for_100_is_refused_before_it_sends(
    limited: tuple[int, BodyBudget],
) -> None:
    port, budget = limited
    with _half_sent(port, "sk-one", "sk-one"):
        assert until(lambda: budget.used == 2 * MIB)
        heard = _exchange(port, _head(MIB, b"Expect: 100-continue"))
    assert heard.startswith(b"HTTP/1.1 429 ")


def test_a_body_waits_for_room() -> None:
    async def wait() -> list[int]:
        budget, order = BodyBudget(2 * MIB, 2 * MIB), list[int]()

        async def use(number: int) -> None:
            async with budget.reserved(MIB):
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(use(n) for n in range(10)))
        assert budget.used == 0
        return order

    assert asyncio.run(wait()) == list(range(10))


def test_a_client_that_leaves_stops_waiting_for_room() -> None:
    async def leave() -> None:
        budget = BodyBudget(2 * MIB, MIB, patience=PATIENCE)
        current_caller.set("a")
        departure = Departure()
        async with budget.reserved(MIB):
            current_departure.set(departure)
            waiting = asyncio.create_task(budget._reserve("a", MIB))
            await asyncio.sleep(0.01)
            departure.set()
            with pytest.raises(ClientDisconnect):
                await waiting
        assert budget.used == 0

    asyncio.run(leave())


def test_a_body_of_the_largest_size_always_has_room() -> None:
    for size in (1000, 32 * MIB, 4096 * MIB):
        budget = budget_for(size)
        assert size <= budget.per_caller <= budget.total // 4


class Proportional(Quick):
    body_periods = 4


def test_a_large_body_must_come_faster_than_a_small_one() -> None:
    """16 bytes in each period are enough for a short body, and not for one of 4,000 bytes."""
    with serving(Proportional) as (port, app):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(_head(4000, path="/first"))
            heard = b""
            connection.settimeout(0.05)
            deadline = time.monotonic() + PATIENCE
            while not heard and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    connection.sendall(b"x" * 20)
                    heard = connection.recv(65536)
        assert heard.startswith(b"HTTP/1.1 408 "), heard
        assert app.left.wait(PATIENCE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "gzip, identity"])
def test_a_body_in_a_coding_is_refused_by_name(path: str, coding: str) -> None:
    with serving(HttpProtocol, _app()) as (port, _):
        header = b"Content-Encoding: %b" % coding.encode()
        heard = _exchange(port, _head(2, header, b"Connection: close", path=path) + b"{}")
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 415 "), heard
        assert b"accept-encoding: identity" in head.lower()
        assert f"'{coding}'" in json.dumps(json.loads(body))
        same = _exchange(
            port,
            _head(2, b"Content-Encoding: identity", b"Connection: close", path=path) + b"{}",
        )
        assert not same.startswith(b"HTTP/1.1 415 ")


def test_a_request_id_that_is_refused_is_not_sent_back() -> None:
    with serving(HttpProtocol, _app()) as (port, _):
        for id in ("é\xff", "a b", "x" * 129):
            header = b"x-request-id: " + id.encode("latin-1")
            heard = _exchange(port, _head(2, header, b"Connection: close") + b"{}")
            assert heard.startswith(b"HTTP/1.1 4") and b"x-request-id:" not in heard.lower()
        header = b"x-request-id: fine-1"
        heard = _exchange(port, _head(2, header, b"Connection: close") + b"{}")
        assert b"x-request-id: fine-1" in heard.lower()


def test_a_half_sent_body_does_not_hold_up_the_end(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    with contextlib.ExitStack() as stack:
        connections = []
        for path, sent in (("/v1/completions", MIB), ("/v1/messages", 10)):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
            stack.enter_context(connection)
            connection.sendall(_head(2 * MIB, path=path) + b"x" * sent)
            connections.append(connection)
        server.health()  # what was sent before is read
        time.sleep(0.2)
        begun = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        for connection in connections:
            heard = b""
            while chunk := connection.recv(65536):
                heard += chunk
            assert heard.startswith(b"HTTP/1.1 503 "), heard
            assert b"connection: close" in heard.lower() and b"retry-after: 1" in heard.lower()
        assert server.process.wait(PATIENCE) == 0
    assert time.monotonic() - begun < 20, "the drain time is 30 s"
    assert "Traceback" not in server.log() and "Exception in ASGI" not in server.log()


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_half_sent_bodies_take_bounded_memory_and_it_is_returned(server: Server) -> None:
    server.health()
    before = _resident(server.process.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            connection = socket.create_connection(("127.0.0.1", server.port))
            stack.enter_context(connection)
            connection.settimeout(0.5)
            with contextlib.suppress(OSError):  # those beyond the limit are not read
                connection.sendall(_head(32 * MIB) + b"x" * (31 * MIB))
        assert _resident(server.process.pid) - before < 250 * MIB
    if find_malloc_trim() is not None:
        assert until(lambda: _resident(server.process.pid) - before < 40 * MIB)


def test_the_heap_is_trimmed_once_for_many_requests() -> None:
    calls: list[int] = []

    def trim(pad: int) -> int:
        calls.append(pad)
        return 1

    async def schedule() -> None:
        trimmer = HeapTrimmer(trim, delay=0.01, pause=PATIENCE)
        for _ in range(100):
            trimmer.schedule()
        while not calls:
            await asyncio.sleep(0.01)
        trimmer.schedule()
        await asyncio.sleep(0.1)

    asyncio.run(schedule())
    assert calls == [0]
