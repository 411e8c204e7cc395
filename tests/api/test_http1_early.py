"""Requests whose rest will never come, or never be read, are answered without waiting for it; and
connections do not become WebSockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
import uvicorn
from api.test_hosts import _app
from api.test_http1 import _exchange, _head, serving
from conftest import PATIENCE, free_port

from millrace.api.connections import ConnectionCount, counted_protocol
from millrace.api.http1 import HttpProtocol

LIMIT = 1000
CHUNKED = b"Transfer-Encoding: chunked"


def _answer(heard: bytes) -> tuple[int, bytes, Any]:
    head, _, body = heard.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head.lower(), json.loads(body)


@pytest.mark.parametrize(
    "value", [b"something", b"100-continue, more", b"200-ok", b"more\r\nExpect: x"]
)
def test_an_unknown_expectation_is_refused_at_once(value: bytes) -> None:
    with serving(HttpProtocol, _app()) as (port, _):
        heard = _exchange(port, _head(b"Content-Length: 8", b"Expect: " + value))
    status, head, body = _answer(heard)
    assert status == 417 and b"connection: close" in head
    assert "100-continue" in body["error"]["message"]


def test_expectations_of_http_1_0_are_ignored() -> None:
    with serving(HttpProtocol, _app()) as (port, _):
        head = _head(b"Content-Length: 2", b"Expect: something", version=b"1.0")
        assert _answer(_exchange(port, head + b"{}"))[0] == 404


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HEAD x HTTP/1.1\r\nHost: x\r\n", 400),
        (b"HEAD /first HTTP/1.1\r\nHost: x, y\r\n", 400),
        (b"HEAD /first HTTP/1.1\r\nHost: x\r\nExpect: y\r\n", 417),
    ],
)
def test_a_head_request_that_is_refused_has_an_answer_without_a_body(
    head: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(HttpProtocol, _app()) as (port, _):
        heard = _exchange(port, head + b"\r\n")
    assert not [r.message for r in caplog.records if r.name == "asyncio"]
    assert heard.startswith(b"HTTP/1.1 %d " % status) and heard.endswith(b"\r\n\r\n")
    assert b"connection: close" in heard.lower()


@pytest.mark.parametrize(
    ("path", "kind"),
    [(b"/v1/chat/completions", "invalid_request_error"), (b"/v1/messages", "request_too_large")],
)
@pytest.mark.parametrize(
    "sent",
    [
        _head(CHUNKED) + b"fffffffffffffff\r\n",
        _head(CHUNKED) + b"ffffffffffffffff\r\n{",
        _head(CHUNKED) + b"1\r\n{\r\n00000000fffffff\r\n",
        _head(b"Content-Length: 1000000000000000000"),
        _head(b"Content-Length: 64001") + b"{",
    ],
)
def test_a_body_that_is_never_read_whole_is_refused_at_once(
    sent: bytes, path: bytes, kind: str
) -> None:
    protocol = counted_protocol(60, ConnectionCount(1024), 64 * LIMIT)
    with serving(protocol, _app(max_body=LIMIT)) as (port, _):
        status, head, body = _answer(_exchange(port, sent.replace(b"/first", path)))
    assert status == 413 and b"connection: close" in head
    assert body["error"]["type"] == kind


UPGRADE = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class WebSocket(asyncio.Protocol):
    """A library's, which would take the connection over."""

    def __init__(self, **given: object) -> None:
        raise AssertionError("the connection is given away")


def test_a_websocket_upgrade_is_answered_as_http_and_its_connection_stays_counted() -> None:
    count, port = ConnectionCount(1024), free_port()
    protocol = counted_protocol(60, count)
    config = uvicorn.Config(
        _app(), port=port, http=protocol, ws=WebSocket, lifespan="off", log_level="critical"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        for _ in range(3):
            heard = _exchange(port, UPGRADE + last)
            assert heard.count(b"HTTP/1.1 200 ") == 2
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(UPGRADE)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert count.open == 1
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert count.open == 0
