"""File descriptors: a raised limit, connections that are too many, and descriptors that run out."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, until

from millrace import descriptors
from millrace.api.connections import ConnectionCount, address_of

EACH = 8
LIMIT = 256
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny") / "tiny", default_model)


Limited = Callable[..., Server]


@pytest.fixture(scope="module")
def limited(folder: Path) -> Iterator[Limited]:
    """Servers with a hard limit of open files."""
    started: list[Server] = []

    def start(soft: int, hard: int, *options: str, of: Path = folder) -> Server:
        shell = f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"'
        within = ("/bin/sh", "-c", shell, "sh")
        started.append(Server(str(of), "--store", "none", *options, within=within))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def small(limited: Limited) -> Server:
    return limited(64, LIMIT, "--max-connections-per-address", str(EACH)).wait_ready()


def _limits(pid: int) -> tuple[int, int]:
    text = Path(f"/proc/{pid}/limits").read_text()
    line = next(line for line in text.splitlines() if line.startswith("Max open files"))
    soft, hard = line.split()[3:5]
    return int(soft), int(hard)


def _connected(server: Server, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(count)]


def _heard(connection: socket.socket) -> bytes:
    connection.settimeout(PATIENCE)
    heard = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            heard += chunk
    return heard


@contextlib.contextmanager
def _held(server: Server, count: int) -> Iterator[list[socket.socket]]:
    server.http.close()  # whose connections are kept open and would count
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE)
    found = _connected(server, count)
    try:
        yield found
    finally:
        for connection in found:
            connection.close()


def _serves(server: Server) -> bool:
    with contextlib.suppress(httpx.TransportError):
        body = {"prompt": "a b", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        return answer.status_code == 200
    return False


@linux
def test_the_limit_is_raised_for_the_server_and_its_engines(small: Server) -> None:
    assert _limits(small.process.pid) == (LIMIT, LIMIT)
    assert _limits(small.engine) == (LIMIT, LIMIT), "nor has mlx-lm changed it"


def _ask(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", lambda body: body["error"]["code"] == "too_many_connections"),
        ("/v1/messages", lambda body: body["type"] == "error"),
        ("/api/chat", lambda body: isinstance(body["error"], str)),
    ],
)
def test_an_address_has_only_so_many_connections(
    small: Server, path: str, shape: Callable[[Any], bool]
) -> None:
    with _held(small, EACH):
        (one,) = _connected(small, 1)
        with one:
            one.sendall(_ask(path, {"messages": [], "more": "x" * 10_000}))
            heard = _heard(one)
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after" in head, heard
        assert shape(json.loads(body)), body
        assert b"--max-connections-per-address" in body
    assert until(lambda: _serves(small)), "those that left are not counted"
    assert small.log().count("connections are refused") == 1, "said once"


def test_half_open_connections_beyond_the_limit_are_cut_and_take_nothing(small: Server) -> None:
    """They neither say anything nor close."""
    with _held(small, EACH), _held(small, 3 * LIMIT) as flood:
        for connection in flood[EACH:]:
            assert _heard(connection) == b""
    assert until(lambda: _serves(small))
    assert small.http.get("/health").status_code == 200


@linux
def test_no_descriptors_at_all_for_a_while(small: Server) -> None:
    """Connections wait; the log says it once; then all goes on."""
    pid = small.process.pid
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used - 4, LIMIT))
    try:
        with _held(small, 4):
            assert until(lambda: "connections wait to be accepted" in small.log())
            time.sleep(2.5)  # it is tried again every second
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    assert until(lambda: _serves(small))
    assert small.log().count("connections wait to be accepted") == 1
    assert "RLIMIT_NOFILE" in small.log() and "LimitNOFILE" in small.log()


@linux
def test_all_addresses_together_leave_descriptors_for_the_server(limited: Limited) -> None:
    server = limited(64, LIMIT, "--max-connections-per-address", "0").wait_ready()
    before = server.engine
    server.http.close()
    flood = _connected(server, LIMIT)
    try:
        with socket.create_connection(("127.0.0.1", server.port), 30) as one:
            one.sendall(_ask("/v1/completions", {"prompt": "a"}))
            heard = _heard(one)
        assert heard.startswith(b"HTTP/1.1 503 ") or heard == b"", heard
        os.kill(before, 9)  # an engine takes descriptors to start
        for connection in flood[20:]:
            connection.close()
        server.http = httpx.Client(base_url=server.url, timeout=PATIENCE)
        assert until(lambda: server.status()["engine_pid"] not in (None, before))
        assert until(lambda: _serves(server))
    finally:
        for connection in flood:
            connection.close()
    assert server.stop() == 0


@linux
@pytest.mark.parametrize("hard", [64, 100])
def test_a_limit_that_is_too_low_for_a_server_is_said_with_the_remedy(
    limited: Limited, hard: int
) -> None:
    server = limited(hard, hard)
    assert server.process.wait(PATIENCE) == 1
    told = " ".join(server.log().split())
    assert "A server needs 128 open files" in told and f"RLIMIT_NOFILE) is {hard}" in told
    assert "ulimit -n 65536" in told and "Traceback" not in told


@linux
def test_a_limit_that_is_too_low_for_an_engine_is_said_with_the_remedy(
    limited: Limited, folder: Path, tmp_path: Path
) -> None:
    """A model in more files than may be open."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for file in folder.iterdir():
        (shards / file.name).write_bytes(file.read_bytes())
    for number in range(100):
        (shards / f"model-{number}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    server = limited(128, 128, of=shards)
    assert server.process.wait(PATIENCE) == 1
    told = " ".join(server.log().split())
    assert "A model in 101 files of weights needs 165 open files" in told, told
    assert "RLIMIT_NOFILE) is 128" in told and "LimitNOFILE" in told


def test_the_default_is_half_of_the_descriptors() -> None:
    assert ConnectionCount(1024).each == 512
    assert ConnectionCount(1024, 3).each == 3
    assert ConnectionCount(1024, 0).each == ConnectionCount(1024).most == 1024 - 128
    assert ConnectionCount(128).most == 32


def test_addresses_are_told_apart_as_clients_are() -> None:
    assert address_of(("127.0.0.1", 5)) == "127.0.0.1"
    assert address_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    assert address_of(("2001:db8::1", 5, 0, 0)) == address_of(("2001:db8::2%eth0", 6, 0, 0))
    assert address_of(("2001:db8::1", 5, 0, 0)) != address_of(("2001:db8:0:1::1", 5, 0, 0))
    assert address_of(None) == address_of("") == ""


def test_systems_that_refuse_a_high_limit_get_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS does, which names no hard limit."""
    limits = [256, resource.RLIM_INFINITY]

    def set_(kind: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 10_240:
            raise ValueError("not allowed")
        limits[0] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_)
    assert descriptors.raise_limit() == 10_240
    assert descriptors.raise_limit() == 10_240, "and stays"
