"""Frames over pipes: how the front and its worker processes hand each other tasks and replies.

A frame is its length and its bytes; what they mean is for the two ends to know.
"""

from __future__ import annotations

import os
import select
import signal
import struct
from collections.abc import Iterator
from typing import BinaryIO, Protocol

_LENGTH = struct.Struct("<Q")
_NICENESS = 10
"""Large prompts and pictures can wait: running streams come first."""


class Writes(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Reads(Protocol):
    def read(self, count: int, /) -> bytes | memoryview: ...


def write_frame(file: Writes, *parts: bytes) -> None:
    """One frame of several parts: what is large is not copied to be put together."""
    file.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        file.write(part)
    file.flush()


def read_frame(file: Reads) -> bytes | memoryview | None:
    """The next frame; None once the other side is gone."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return data if len(data) == length else None


class WorkerEnd:
    """A worker's end of the pipes, which are its standard input and output."""

    def __init__(self, nicer: int = _NICENESS) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(nicer)
        # Whatever prints must not end up between the frames.
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._tasks = os.fdopen(0, "rb", buffering=0)

    def tasks(self, idle: float) -> Iterator[bytes]:
        """Tasks as they come, until the front is gone or nothing has come for `idle` seconds."""
        while select.select([self._tasks], [], [], idle)[0]:
            data = read_frame(_Whole(self._tasks))
            if data is None:
                return
            yield bytes(data)

    def reply(self, *parts: bytes) -> None:
        write_frame(self._out, *parts)


class _Whole:
    """Reads as much as is asked for; not buffered, so that `select` sees all that is waiting."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self._file.read(min(count, 1 << 20))
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
