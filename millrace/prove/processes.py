"""Processes for the time of a block: their output in a file, their end certain, their memory looked at.

A temporary home keeps what they write apart from the user's; compiled kernels and libraries are shared
with it, since every start after the first finds them there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import millrace
from millrace.config import home
from millrace.errors import SetupError

_STOP_PATIENCE = 20.0
_SHARED = ("compiled", "blas")
_KEPT = ("MILLRACE_BLAS",)
"""Of the user's settings; others are options of a server, and the proof has its own."""


def environment(room: Path) -> dict[str, str]:
    """What children are told: a home of their own, and this very package wherever they run."""
    told = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_") or k in _KEPT}
    source = str(Path(millrace.__file__).resolve().parents[1])
    paths = [
        str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p
    ]
    told["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([source, *paths]))
    told["MILLRACE_HOME"] = str(room / "home")
    return told


def furnish(room: Path) -> None:
    """Make the temporary home."""
    own = room / "home"
    own.mkdir()
    for name in _SHARED:
        kept = home() / name
        with contextlib.suppress(OSError):  # then it is made anew, which takes some seconds
            kept.mkdir(parents=True, exist_ok=True)
            (own / name).symlink_to(kept.resolve(), target_is_directory=True)


class ChildProcess:
    """A process and the file its output goes to."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self.process = process
        self._log = log

    def failed(self, why: str) -> SetupError:
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ]
        return SetupError(f"{self.name} {why}" + (f" It said: {lines[-1][:300]}" if lines else ""))


@contextlib.contextmanager
def child(
    name: str, module: str, *words: str, room: Path, talks: bool = False
) -> Iterator[ChildProcess]:
    """`python -m MODULE WORDS` for the time of the block; `talks` opens pipes to it."""
    log = room / f"{len(list(room.glob('*.log')))}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=environment(room),
            cwd=room,  # where no configuration file of the user's lies
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else out,
            stderr=out,
            text=True,
        )
    try:
        yield ChildProcess(name, process, log)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def resident(pid: int) -> int | None:
    """Bytes of a process that are in memory; None where nobody says."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        pass
    try:
        told = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, timeout=10
        )
        return int(told.stdout) << 10
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
