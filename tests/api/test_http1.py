"""Raw sockets: requests that could be read in two ways, and clients that stop in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from conftest import PATIENCE, free_port

from millrace.api.http1 import HttpProtocol

BODY = b'{"a": 1}'
SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"


class Quick(HttpProtocol):
    first_byte = 1.0
    head_time = 0.6
    body_time = 0.6
    body_least = 16


class Echo:
    """Answers with the length of what it was sent, after a pause if the path asks for one."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(8 if scope["path"] == "/slow" else 0):
            await send({"type": "http.response.body", "body": b".", "more_body": True})
            await asyncio.sleep(0.15)
        await send({"type": "http.response.body", "body": b"read %d" % size})


@contextmanager
def serving(protocol: type[HttpProtocol]) -> Iterator[tuple[int, Echo]]:
    app, port = Echo(), free_port()
    config = uvicorn.Config(
        app, port=port, http=protocol, lifespan="off", log_level="critical", timeout_keep_alive=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port, app
    server.should_exit = True
    thread.join(PATIENCE)


@pytest.fixture
def echo() -> Iterator[tuple[int, Echo]]:
    with serving(HttpProtocol) as found:
        yield found


@pytest.fixture
def hasty() -> Iterator[tuple[int, Echo]]:
    """A server that gives up soon; where it must not, a machine that stalls gets a few tries."""
    with serving(Quick) as found:
        yield found


def _exchange(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send piece by piece, and hear all until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        heard = b""
        while chunk := connection.recv(65536):
            heard += chunk
        return heard


def _head(*headers: bytes, version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"POST /first HTTP/" + version, b"Host: x", *headers, b"", b""])


@pytest.mark.parametrize(
    "first",
    [
        _head(b"Content-Length: 8", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
        _head(b"Transfer-Encoding: chunked", b"Content-Length: 8") + b"8\r\n" + BODY + b"\r\n0\r\n\r\n",
        _head(b"Content-Length: 0", b"transfer-encoding: Chunked") + b"0\r\n\r\n",
        _head(b"Transfer-Encoding: chunked", version=b"1.0") + b"0\r\n\r\n",
        _head(b"Content-Length: 8", b"Content-Length: 9") + BODY,
        _head(b"Content-Length: 8, 9") + BODY,
        _head(b"Content-Length: +8") + BODY,
        _head(b"Content-Length: 0x8") + BODY,
        _head(b"Content-Length: -1"),
        _head(b"Content-Length: 99999999999999999999999999"),
        _head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity") + b"0\r\n\r\n",
        _head(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
        _head(b"Transfer-Encoding : chunked") + b"0\r\n\r\n",
        _head(b"Content-Length : 8") + BODY,
    ],
)  # fmt: skip
def test_a_request_whose_end_is_in_doubt_is_refused_and_nothing_after_it_is_read(
    echo: tuple[int, Echo], first: bytes
) -> None:
    port, app = echo
    heard = _exchange(port, first + SECOND)
    assert heard.startswith(b"HTTP/1.1 400 "), heard
    assert heard.count(b"HTTP/1.1 ") == 1, "the rest is not a request"
    assert b"connection: close" in heard.lower()
    assert app.paths == []


@pytest.mark.parametrize("chunk", [b"-1\r\n", b"0x8\r\n", b"8_0\r\n", b"fffffffffffffffffffffff\r\n",
                                   b"zz\r\n", b"\r\n", b"8\r\n" + BODY + b"12"])  # fmt: skip
def test_a_bad_chunk_ends_the_connection(echo: tuple[int, Echo], chunk: bytes) -> None:
    port, app = echo
    heard = _exchange(port, _head(b"Transfer-Encoding: chunked") + chunk + b"x\r\n" + SECOND)
    assert heard.startswith(b"HTTP/1.1 400 "), heard
    assert heard.count(b"HTTP/1.1 ") == 1
    assert "/second" not in app.paths
    assert app.left.wait(PATIENCE), "the application is told that nobody is there"


@pytest.mark.parametrize(
    "head", [_head(b"Content-Length: 8"), _head(b"Content-Length: 8", b"Content-Length: 8")]
)
def test_sound_requests_are_answered_one_after_the_other(
    echo: tuple[int, Echo], head: bytes
) -> None:
    port, app = echo
    heard = _exchange(port, head + BODY + SECOND.replace(b"Host", b"Connection: close\r\nHost"))
    assert heard.count(b"HTTP/1.1 200 ") == 2, heard
    assert b"read 8" in heard
    assert app.paths == ["/first", "/second"]


def _given_up(port: int, sent: bytes) -> bytes:
    """What is heard of a server that waits for more; of one that waited for this, nothing."""
    for _ in range(5):
        with contextlib.suppress(OSError):
            if heard := _exchange(port, sent):
                return heard
    return b""


def test_a_head_that_does_not_begin_is_given_up(hasty: tuple[int, Echo]) -> None:
    assert _exchange(hasty[0]) == b""


@pytest.mark.parametrize("sent", [b"P", b"POST /first HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_given_up(hasty: tuple[int, Echo], sent: bytes) -> None:
    heard = _given_up(hasty[0], sent)
    assert heard.startswith(b"HTTP/1.1 408 "), heard


def test_a_head_that_drips_is_given_up_too(hasty: tuple[int, Echo]) -> None:
    """Every byte in time, and the whole of it never."""
    with socket.create_connection(("127.0.0.1", hasty[0]), timeout=PATIENCE) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(100):
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.05)


@pytest.mark.parametrize(
    "head", [_head(b"Content-Length: 8000"), _head(b"Transfer-Encoding: chunked")]
)
def test_a_body_that_stops_is_given_up(hasty: tuple[int, Echo], head: bytes) -> None:
    port, app = hasty
    heard = _given_up(port, head + b"5\r\nhello\r\n")
    assert heard.startswith(b"HTTP/1.1 408 "), heard
    assert app.left.wait(PATIENCE)


def test_a_slow_body_that_goes_on_is_read_to_its_end(hasty: tuple[int, Echo]) -> None:
    head = _head(b"Content-Length: 400", b"Connection: close")

    def is_read() -> bool:
        try:
            return b"read 400" in _exchange(hasty[0], head, *[b"x" * 20] * 20, pause=0.06)
        except OSError:
            return False

    assert any(is_read() for _ in range(5))


def test_a_long_answer_and_an_idle_connection_are_left_alone(hasty: tuple[int, Echo]) -> None:
    def answered(connection: socket.socket) -> bool:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = b""
        while not heard.endswith(b"0\r\n\r\n"):
            chunk = connection.recv(65536)
            if not chunk:
                return False
            heard += chunk
        return b"read 0" in heard

    def are_left_alone() -> bool:
        with socket.create_connection(("127.0.0.1", hasty[0]), timeout=PATIENCE) as connection:
            if not answered(connection):
                return False
            time.sleep(1.2)  # within keep-alive, beyond all the others
            try:
                return answered(connection)
            except OSError:
                return False

    assert any(are_left_alone() for _ in range(5))
