"""Fixtures: the default model, a server of our own as users start it, and the shared material."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
# Every server is two processes of hundreds of modules: to compile them all at each start takes minutes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests that run side by side get a core each: BLAS threads that outnumber the cores wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No test asks a hub but its own: whatever is to be fetched meets a port that nothing listens on.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("MILLRACE_PYTHON", sys.executable)
"""What servers are started with, where the tests run without millrace's own environment."""
LONGEST = (
    "test_faults",
    "test_lines_37_to_42",
    "test_models_on_demand",
    "test_cache_faults",
    "test_openapi",
    "test_neighbours",
    "test_replay",
    "test_disconnects",
    "test_admission",
    "test_fuzz",
)
"""Files that take long. A file is one worker's: begun last, they would run alone at the end."""


def pytest_configure(config: pytest.Config) -> None:
    # Else those with the fewest tests would come last, which are those that take longest.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_own = range(10_000 + _WORKER, 26_000, _WORKERS)
_ports = iter(random.SystemRandom().sample(_own, len(_own)))
"""Below those that systems give to connections, and none that tests beside these or servers choose: one
that is free stays so until a server has it."""


def free_port() -> int:
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


PATIENCE = 120.0
"""Seconds for what takes a moment on an idle machine. Tests may run on one that is slow, busy, and stalls
any process for seconds: they wait for what must come, and hold still what must not have passed."""


def until(condition: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Whether it comes to pass: at once on an idle machine, and in time on a busy one."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """A process that does not get to run. Servers end an engine that is silent for eight seconds."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Gate:
    """Before the engines of servers that have its `env`: while it is closed, those that start wait."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "closed"

    @property
    def env(self) -> dict[str, str]:
        found = [str(ROOT / "tests" / "gate"), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, found)),
            "MILLRACE_TEST_GATE": str(self._file),
        }

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        self._file.touch()
        try:
            yield
        finally:
            self._file.unlink()


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

    def __init__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        only: bool = True,
        within: Sequence[str] = (),
    ) -> None:
        """`only` keeps from it what models the machine has besides; `within` is a command that runs it."""
        if only and "--only" not in args:
            args = (*args, "--only")
        if "--cache-disk" not in args:
            args = (*args, "--cache-disk", "0")  # what one test leaves on disk, no other finds
        if "--store" not in args:
            self._folder = tempfile.TemporaryDirectory()
            args = (*args, "--store", f"{self._folder.name}/responses.sqlite")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # One client for all: each costs a context for TLS, which takes longer than most requests.
        self.http = httpx.Client(
            base_url=self.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)
        )
        # A file, not a pipe: nobody reads along, and a full pipe would stop the server.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._shown = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*within, PYTHON, "-m", "millrace", "serve", *args, "--port", str(self.port)],
            env=os.environ | (env or {}),
            stdout=self._shown,
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
        return _written(self._log.fileno())

    def shown(self) -> str:
        """All that the server wrote to stdout so far: its banner."""
        return _written(self._shown.fileno())

    @property
    def engine(self) -> int:
        """Its first model's process."""
        return int(self.status()["engine_pid"])

    def kill_engine(self) -> None:
        os.kill(self.engine, signal.SIGKILL)

    def restarted(self, before: int = 0) -> None:
        """Waits until an engine has been replaced once more, and the new one is ready."""
        assert until(lambda: self.status()["restarts"] > before), self.log()[-3000:]
        self.wait_ready()

    def stop(self, timeout: float = PATIENCE) -> int:
        return ended(self.process, timeout)


def _written(file: int) -> str:
    # The position is the server's, too: read without moving it.
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


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
