"""Fixtures: the default model, a server of our own as users start it, and the shared material."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")

# A shell that starts the tests in the background has them ignore interrupts, which some are about.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests that run side by side get a core each: BLAS threads that outnumber the cores wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("MILLRACE_PYTHON", sys.executable)
"""What servers are started with, where the tests run without millrace's own environment."""
LONGEST = ("test_faults", "test_replay", "test_lines_37_to_42", "test_fuzz", "test_neighbours")
"""Files that take minutes. A file is one worker's: begun last, they would run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ended(process: subprocess.Popen[Any], timeout: float) -> int:
    """How a process ends that is asked to; one that does not is killed, which is an error."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


class Server:
    """A `millrace serve` process and how to reach it."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, only: bool = True) -> None:
        """`only` keeps from it what models the machine has besides."""
        if only and "--only" not in args:
            args = (*args, "--only")
        if "--cache-disk" not in args:
            args = (*args, "--cache-disk", "0")  # what one test leaves on disk, no other finds
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # One client for all: each costs a context for TLS, which takes longer than most requests.
        self.http = httpx.Client(
            base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=None)
        )
        # A file, not a pipe: nobody reads along, and a full pipe would stop the server.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [PYTHON, "-m", "millrace", "serve", *args, "--port", str(self.port)],
            env=os.environ | (env or {}),
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    def wait_ready(self, timeout: float = 240) -> Server:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log()}")
            try:
                if self.health()["status"] == "ready":
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError("the server did not become ready")

    def health(self) -> dict[str, Any]:
        return dict(self.http.get("/health").json())

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/status").json()["models"][0])

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def log(self) -> str:
        """All that the server and its engine wrote to stderr so far."""
        file = self._log.fileno()  # its position is the server's, too: read without moving it
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def kill_engine(self) -> None:
        os.kill(self.status()["engine_pid"], signal.SIGKILL)

    def stop(self, timeout: float = 40) -> int:
        return ended(self.process, timeout)


@pytest.fixture(scope="session")
def default_model() -> Path:
    from millrace.models.resolve import resolve

    return resolve(None).path


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[Server]:
    running = Server().wait_ready()
    yield running
    running.stop()


@pytest.fixture
def start(default_model: Path) -> Iterator[Callable[..., Server]]:
    """Start further servers; all are stopped when the test ends."""
    started: list[Server] = []

    def make(*args: str, **kwargs: Any) -> Server:
        started.append(Server(*args, **kwargs))
        return started[-1]

    yield make
    for running in started:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture(scope="session")
def material() -> Path:
    folder = Path(os.environ.get("MILLRACE_MATERIAL", ROOT.parent / "shared" / "material"))
    if not folder.is_dir():
        pytest.skip(f"no test material at {folder} (set MILLRACE_MATERIAL)")
    return folder
