"""What the benchmarks share: the model as float32, servers as child processes, prompts, verdicts.

Nothing here imports MLX: every contender computes in a process of its own, with the BLAS chosen
for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from millrace.bench.lengths import Fixed
from millrace.bench.workload import Item, Sizing, WorkloadShape, generate
from millrace.config import home
from millrace.errors import SetupError

HERE = Path(__file__).resolve().parent
_STOP_PATIENCE = 20.0
_IDLE = 0.3


def default_model() -> Path:
    """The default model's folder, fetched and converted if it is not there yet."""
    from millrace.models.resolve import resolve

    return Path(resolve(None).path)


def float32_copy(model: Path) -> Path:
    """A float32 copy of a model folder, made once and kept in millrace's cache."""
    parts = [*sorted(model.glob("*.safetensors")), model / "config.json"]
    marks = [f"{part.name} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in parts]
    key = hashlib.sha256("\n".join([str(model.resolve()), *marks]).encode()).hexdigest()[:12]
    target = home() / "benchmarks" / f"{model.name}-float32-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        generated = Path(folder, "model")
        command = [sys.executable, str(HERE / "float32.py"), str(model), str(generated)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SetupError(f"The float32 copy of {model} could not be made:\n{done.stderr}")
        shutil.move(generated, target)
    return target


def our_blas() -> str | None:
    """The library millrace computes with, for LD_PRELOAD; None where MLX's own is used."""
    from millrace.models.blas import prepare

    found = prepare()
    if found.problem:
        raise SetupError(found.problem)
    return found.path


def with_blas(library: str | None) -> dict[str, str]:
    return {"LD_PRELOAD": library} if library else {}


def prompts(count: int, tokens: int, max_tokens: int, seed: int, stream: str) -> list[Item]:
    """Prompts for /v1/completions that differ from their first words on."""
    shape = WorkloadShape(
        prompt=Fixed(tokens),
        output=Fixed(max_tokens),
        chat=False,
        sizing=Sizing(tokens_per_word=1.5, overhead=16.0),
    )
    return generate(shape, count, seed, stream)


def warn_if_busy(console: Console) -> None:
    """Says so when other work is running: ratios then swing by more than they show."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _IDLE * cores:
        console.print(
            f"[yellow]The machine is busy (load {load:.1f} on {cores} cores): "
            f"measure again when it is idle.[/]",
            highlight=False,
        )


class Stolen:
    """What part of this machine's cores its host gives to others, from now on; Linux tells."""

    def __init__(self) -> None:
        self._before = self._look()

    def share(self) -> float | None:
        taken, passed = (now - then for now, then in zip(self._look(), self._before, strict=True))
        return taken / passed if passed else None

    @staticmethod
    def _look() -> tuple[int, int]:
        try:
            ticks = [
                int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
            ]
        except OSError:
            return 0, 0
        return ticks[7], sum(ticks)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Child:
    """A contender's process and the file its output goes to."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    url: str = ""

    def failed(self, why: str) -> SetupError:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return SetupError(f"{self.name}: {why}\n{tail}")


@contextmanager
def child(
    name: str,
    command: list[str],
    *,
    logs: Path,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    talks: bool = False,
) -> Iterator[Child]:
    """A process for the time of the block; `talks` opens pipes to its stdin and stdout."""
    log = logs / f"{name.replace(' ', '-')}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else out,
            stderr=out,
            text=True,
        )
    try:
        yield Child(name, process, log, f"http://127.0.0.1:{port}" if port else "")
    finally:
        process.terminate()
        try:
            process.wait(_STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_healthy(server: Child, patience: float = 120.0) -> None:
    """Until /health says that requests will be served."""
    deadline = time.monotonic() + patience
    with httpx.Client(trust_env=False) as http:
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                raise server.failed(f"ended with status {server.process.returncode}.")
            try:
                answer = http.get(f"{server.url}/health", timeout=5)
                if answer.status_code == 200 and answer.json().get("status") in ("ok", "ready"):
                    return
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(0.1)
    raise server.failed(f"not ready after {patience:.0f} s.")
