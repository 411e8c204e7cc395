"""The servers that run on this machine, as records in millrace's own folder.

Each server writes one file under `servers/` and holds a lock on it for as long as it lives. The system
releases the lock when the process ends, however it ends: a record without a lock is stale and is removed
by whoever reads it. That needs no /proc and no signal to a process id that may have been reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from millrace.config import home

Pool = Literal["host", "cuda"]
"""Whose memory a server's models take: the machine's, or that of a card with memory of its own."""
_FOLDER, _SUFFIX = "servers", ".json"
_UNSEEN = ".new"
"""The suffix of records that are being made."""
_MAKING = 60.0
"""Seconds after which such a record that nobody holds is removed."""
_BLOCK = 512
"""Records are padded to a multiple of this, so that one write replaces a whole record."""
_TRIES = 3
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Addresses that stand for all of the machine's, and one of them that can be connected to."""


class ServerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of all models of a server."""

    weights: int = 0
    kv_in_use: int = 0
    ceiling: int = 0
    """What they may take at most."""
    held: int = 0
    """What they take now: weights, key-value memory, and what their processes need besides."""


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    pid: int
    name: str = ""
    """Given with `serve --server-name`."""
    machine: str = ""
    """The folder may be shared by machines and by containers; each sees its own servers alone."""
    pool: Pool = "host"
    started: float = 0.0
    private: str = ""
    """The command that started it for itself and ends it; empty for a server that is there for others."""
    models: tuple[str, ...] = ()
    """The models that it loads at its start."""
    memory: ServerMemory = ServerMemory()

    @property
    def url(self) -> str:
        host = _ANY.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"{self.name} (port {self.port})" if self.name else f"port {self.port}"


def this_machine() -> str:
    """What tells machines and containers apart that share the folder.

    A Mac's name changes with its network, and its cache folder is its own: one word will do there.
    """
    return "mac" if sys.platform == "darwin" else platform.node()


class Registration:
    """This process's record, from `open` until `close` or the end of the process."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record
        self._descriptor: int | None = None
        self._path: Path | None = None
        self._written = b""

    def open(self) -> None:
        """Publish the record; where the folder cannot be written, other programs do not find the server."""
        with contextlib.suppress(OSError):
            folder = home().absolute() / _FOLDER
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"{self.record.port}-{secrets.token_hex(4)}"
            path, unseen = folder / f"{name}{_SUFFIX}", folder / f"{name}{_UNSEEN}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(unseen, flags, 0o600)
            try:
                # Readers see it when it is locked and whole.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._descriptor = descriptor
                self._write()
                unseen.rename(path)
            except OSError:
                self._descriptor = None
                os.close(descriptor)
                unseen.unlink(missing_ok=True)
                raise
            self._path = path

    def update(self, memory: ServerMemory) -> None:
        if memory != self.record.memory:
            self.record = msgspec.structs.replace(self.record, memory=memory)
            with contextlib.suppress(OSError):
                self._write()

    def close(self) -> None:
        if self._descriptor is None or self._path is None:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def others(self) -> list[ServerRecord]:
        """The other servers of this machine."""
        return [record for path, record in _live() if path != self._path]

    def _write(self) -> None:
        if self._descriptor is None:
            return
        text = msgspec.json.encode(self.record)
        size = max(-(-len(text) // _BLOCK) * _BLOCK, len(self._written))
        whole = text.ljust(size)
        if whole != self._written:
            os.pwrite(self._descriptor, whole, 0)
            self._written = whole


def _sweep() -> None:
    """Remove records whose servers were killed while they made them."""
    with contextlib.suppress(OSError):
        for path in (home().absolute() / _FOLDER).glob(f"*{_UNSEEN}"):
            if time.time() - path.stat().st_mtime > _MAKING:
                _stale(path)


def running() -> list[ServerRecord]:
    """The servers of this machine, those that started first before others; removes stale records."""
    return [record for _, record in _live()]


def _live() -> list[tuple[Path, ServerRecord]]:
    found = []
    _sweep()
    for path in _paths():
        with contextlib.suppress(OSError):
            if not _stale(path) and (record := _read(path)) is not None:
                found.append((path, record))
    here = this_machine()
    return sorted((f for f in found if f[1].machine == here), key=lambda f: f[1].started)


def _paths() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (home().absolute() / _FOLDER).glob(f"*{_SUFFIX}")


def _stale(path: Path) -> bool:
    """Whether no process holds the record; such a record is removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _same(path, descriptor):
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _same(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _read(path: Path) -> ServerRecord | None:
    for attempt in range(_TRIES):
        try:
            return msgspec.json.decode(path.read_bytes(), type=ServerRecord)
        except msgspec.MsgspecError:  # a record that is being written
            if attempt + 1 < _TRIES:
                time.sleep(0.01)
    return None
