"""Raw sockets: requests that could be read in two ways, and clients that stop in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from api.test_hosts import _app
from conftest import PATIENCE, free_port

from millrace.api.http1 import HttpProtocol

BODY = b'{"a": 1}'
REST = BODY + b"\r\n0\r\n\r\n"
"""What is left of a chunked body after the size of its only chunk."""
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
def serving(protocol: type[HttpProtocol], app: Any = None) -> Iterator[tuple[int, Any]]:
    app, port = app or Echo(), free_port()
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
        _head(b"Content-Length: 8", b"X-A: b\nContent-Length: 0") + BODY,
        _head(b"Content-Length: 0", b"X-A: b\r X-B: c"),
        _head(b"X-A: b", b" Content-Length: 8") + BODY,
        _head(b"X-A: b", b"\tfolded"),
        _head(b" X-A: b"),
        _head(b"X-A: a\x00b"),
        _head(b"X-A: a\x01b"),
        _head(b"X-A: a\x7fb"),
        _head(b"X-\xffA: b"),
        _head(b"X-A"),
        _head(b": b"),
        b"POST /first HTTP/1.1\nHost: x\nContent-Length: 0\n\n",
        b"POST /first HTTP/1.1\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"POST /first HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\n",
        b"POST /first HTTP/1.1\r\nHost: x\r\nContent-Length: 0\n\r\n",
        b"POST  /first HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /fir st HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /first\r\nHost: x\r\n\r\n",
        b"POST /first http/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST first HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n",
        b"GET http://y/first HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x@y/first HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET ftp://x/first HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:///first HTTP/1.1\r\nHost:\r\n\r\n",
        b"POST /first HTTP/1.1\r\n\r\n",
        b"POST /first HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
        b"POST /first HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n",
        *(
            b"POST /first HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
            for host in (b"x, y", b"x,y", b"x y", b"[::1].y", b"u@x", b"x:y", b"x/", b"[::1%25a]", b"\xe4")
        ),
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
    error = json.loads(heard.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error" and error["message"].endswith(".")


@pytest.mark.parametrize("host", [b"x", b"X.example:8000", b"[::1]:80", b"10.0.0.1", b"a_b", b""])
def test_hosts_that_are_names_are_read(echo: tuple[int, Echo], host: bytes) -> None:
    ask = b"GET /first HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n"
    assert _exchange(echo[0], ask).startswith(b"HTTP/1.1 200 ")


def test_an_address_on_this_host_is_its_path(echo: tuple[int, Echo]) -> None:
    port, app = echo
    for target in (b"http://X:80/first?a=http://y", b"http://x:80"):
        ask = b"GET " + target + b" HTTP/1.1\r\nHost: x:80\r\nConnection: close\r\n\r\n"
        assert _exchange(port, ask).startswith(b"HTTP/1.1 200 ")
    assert app.paths == ["/first", "/"]


@pytest.mark.parametrize("version", [b"2.0", b"1.2", b"0.9", b"3.0"])
def test_other_versions_are_refused(echo: tuple[int, Echo], version: bytes) -> None:
    assert _exchange(echo[0], _head(version=version)).startswith(b"HTTP/1.1 505 ")


@pytest.mark.parametrize(
    "first",
    [
        _head(b"X-A: " + b"a" * 70_000),
        _head(*[b"X-A%d: b" % i for i in range(8000)]),
        b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        _head(b"Transfer-Encoding: chunked") + b"0\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
)
def test_large_headers_are_refused_whole_or_in_pieces(echo: tuple[int, Echo], first: bytes) -> None:
    port, _ = echo
    for pieces in ([first], [first[:66_000], first[66_000:]]):
        heard = _exchange(port, *pieces, pause=0.05)
        assert heard.startswith(b"HTTP/1.1 431 "), heard
        assert heard.count(b"HTTP/1.1 ") == 1


def test_headers_in_pieces_are_checked_as_they_come(echo: tuple[int, Echo]) -> None:
    port, app = echo
    sound = _head(b"Content-Length: 8", b"Connection: close") + BODY
    for at in range(1, len(sound) - len(BODY) + 1):
        assert b"read 8" in _exchange(port, sound[:at], sound[at:], pause=0.002)
    bad = _head(b"X-A: b", b" folded", b"Content-Length: 0")
    count = len(app.paths)
    for at in (bad.index(b" folded") - 2, bad.index(b" folded") - 1, bad.index(b" folded") + 1):
        assert _exchange(port, bad[:at], bad[at:], pause=0.02).startswith(b"HTTP/1.1 400 ")
    assert len(app.paths) == count


def test_a_line_without_its_carriage_return_is_refused_before_the_head_ends(
    echo: tuple[int, Echo],
) -> None:
    assert _exchange(echo[0], b"GET /first HTTP/1.1\n").startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "chunk",
    [
        b"-1\r\n", b"0x8\r\n", b"8_0\r\n", b"fffffffffffffffffffffff\r\n", b"zz\r\n", b"\r\n",
        b" 8\r\n", b"+8\r\n", b"8\n", b"8\r", b"8;a\n", b"8\x00\r\n", b"8\r\n" + BODY + b"12",
        b"8;a=b\r\n" + REST, b"8;\r\n" + REST, b"8 \r\n" + REST, b"8\t\r\n" + REST,
        b"00000000000000008\r\n" + REST, b"8\r\n" + BODY + b"\n0\r\n",
        b"0\r\nX-A: b\n\n", b"0\r\nX-A: b\r\n c\r\n\r\n",
    ],
)  # fmt: skip
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


def test_chunks_that_come_byte_by_byte_are_read(echo: tuple[int, Echo]) -> None:
    body = b"8\r\n" + BODY + b"\r\n000a\r\n" + b"x" * 10 + b"\r\n0\r\nX-Sum: 1\r\n\r\n"
    head = _head(b"Transfer-Encoding: chunked", b"Connection: close")
    pieces = [body[at : at + 1] for at in range(len(body))]
    assert b"read 18" in _exchange(echo[0], head, *pieces, pause=0.002)
    assert b"read 18" in _exchange(echo[0], head + body)


def test_requests_in_one_segment_are_answered_in_order(echo: tuple[int, Echo]) -> None:
    port, app = echo
    asked = []
    for number in range(50):
        path = b"/slow" if number == 3 else b"/%d" % number
        size = number % 7
        length = b"Content-Length: %d" % size
        head = _head(length) if number % 2 else _head(b"Transfer-Encoding: chunked")
        chunked = (b"%x\r\n" % size + b"x" * size + b"\r\n" if size else b"") + b"0\r\n\r\n"
        body = b"x" * size if number % 2 else chunked
        asked.append(head.replace(b"/first", path) + body)
    last = SECOND.replace(b"Host", b"Connection: close\r\nHost")
    heard = _exchange(port, b"".join(asked) + last)
    assert heard.count(b"HTTP/1.1 200 ") == 51
    told = [
        part[5:6] for part in heard.split(b"HTTP/1.1 ") for part in [part[part.find(b"read ") :]]
    ]
    assert told[1:] == [b"%d" % (number % 7) for number in range(50)] + [b"0"]
    assert app.paths == [*(f"/{n}" if n != 3 else "/slow" for n in range(50)), "/second"]


def test_a_bad_request_behind_good_ones_is_refused_after_their_answers(
    echo: tuple[int, Echo],
) -> None:
    heard = _exchange(echo[0], SECOND + SECOND + b"GET /third HTTP/1.1\nHost: x\n\n" + SECOND)
    assert [part[:3] for part in heard.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]
    assert echo[1].paths == ["/second", "/second"]


EXPECTS = b"Expect: 100-continue"


@pytest.mark.parametrize(
    ("path", "kind"),
    [(b"/v1/chat/completions", "invalid_request_error"), (b"/v1/messages", "request_too_large")],
)
def test_a_body_that_is_too_large_is_refused_before_it_is_sent(path: bytes, kind: str) -> None:
    with serving(HttpProtocol, _app(max_body=1000)) as (port, _):
        for size in (1001, 10**18):
            length = b"Content-Length: %d" % size
            heard = _exchange(port, _head(length, EXPECTS).replace(b"/first", path))
            head, _, body = heard.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 413 "), heard
            assert b"connection: close" in head.lower()
            assert json.loads(body)["error"]["type"] == kind


def test_a_body_of_the_allowed_size_is_asked_for() -> None:
    with serving(HttpProtocol, _app(max_body=1000)) as (port, _):
        length = b"Content-Length: 8"
        ask = _head(length, b"Connection: close", EXPECTS).replace(b"/first", b"/v1/completions")
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(ask)
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
            connection.sendall(BODY)
            heard = b""
            while chunk := connection.recv(65536):
                heard += chunk
        assert heard.startswith(b"HTTP/1.1 4") and not heard.startswith(b"HTTP/1.1 413 ")


def test_head_over_a_connection_that_goes_on() -> None:
    """The next answer begins where the headers end, after a stream's too."""
    with serving(HttpProtocol, _app()) as (port, _):
        asks = [
            b"HEAD " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for path in (b"/health", b"/v1/status/stream", b"/docs", b"/v1/chat/completions")
        ]
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        heard = _exchange(port, b"".join(asks) + last)
    answers = heard.split(b"HTTP/1.1 ")[1:]
    assert [a[:3] for a in answers] == [b"200", b"200", b"200", b"405", b"200"]
    assert all(a.endswith(b"\r\n\r\n") for a in answers[:-1])
    assert b"allow: POST" in answers[3]


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


def test_a_body_in_thousands_of_tiny_chunks_is_refused(echo: tuple[int, Echo]) -> None:
    head = _head(b"Transfer-Encoding: chunked", b"Connection: close")
    end = b"0\r\n\r\n"
    few = _exchange(echo[0], head + b"1\r\n \r\n" * 2000 + end)
    assert b"read 2000" in few
    large = _exchange(echo[0], head + (b"40\r\n" + b" " * 64 + b"\r\n") * 5000 + end)
    assert b"read 320000" in large
    with contextlib.suppress(ConnectionError):
        many = _exchange(echo[0], head + b"1\r\n \r\n" * 5000 + end)
        assert many.startswith(b"HTTP/1.1 400") and b"chunks" in many
