"""The flight recorder: a little shared memory that an engine writes and the front reads.

It tells that the engine's process lives, that its work moves on, how long the work at hand may
take, and which requests it is for: also when the engine is frozen, stuck or dead. It knows nothing
of the work itself, imports nothing of ours, and its writes are stores to memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_NAMED = 128
"""Requests that are named; of more, only how many they are."""
BEAT_SECONDS = 0.5
LOAD_PATIENCE = 600.0
"""Seconds that loading, compiling kernels and warming up may take."""

# One unsigned 64-bit word each: aligned, so that a reader never sees half of a store.
_BEATS, _PROGRESS, _PATIENCE, _COUNT, _NAMES = range(5)
_BYTES = 8 * (_NAMES + MOST_NAMED)
_IDLE = 0
"""As a patience: there is no work."""
_UNKNOWN = (1 << 64) - 1
"""As a count of names: they are being written, or are too many."""
_PACK = [struct.Struct(f"{count}Q").pack_into for count in range(MOST_NAMED + 1)]


class FlightRecorder(Protocol):
    """What the engine says of its work. Each call is some stores to memory, and none fails."""

    def working(self, requests: Sequence[int], patience: float) -> None:
        """Work for these requests begins, of which some part is done within `patience` seconds."""

    def progress(self) -> None:
        """A part of it is done."""

    def idle(self) -> None:
        """There is nothing to do until a message comes."""


class NullRecorder:
    """For an engine that nobody watches."""

    def working(self, requests: Sequence[int], patience: float) -> None: ...

    def progress(self) -> None: ...

    def idle(self) -> None: ...


class SharedRecorder:
    """The engine's side. One thread calls it; `beat` starts another, which only counts."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, _BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._progress = 0
        self._named: list[int] = []

    def beat(self) -> None:
        """Count for as long as the process runs: a count that stands still tells that it does not."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        pause = threading.Event()
        while True:
            self._words[_BEATS] += 1
            pause.wait(BEAT_SECONDS)

    def working(self, requests: Sequence[int], patience: float) -> None:
        words = self._words
        if requests != self._named:
            # A death from here on, before the count is there, leaves names that nobody believes.
            words[_COUNT] = _UNKNOWN
            if (count := len(requests)) <= MOST_NAMED:
                _PACK[count](self._map, 8 * _NAMES, *requests)
                words[_COUNT] = count
            self._named = list(requests)
        words[_PATIENCE] = int(patience * 1000) or 1
        self._progress += 1
        words[_PROGRESS] = self._progress

    def progress(self) -> None:
        self._progress += 1
        self._words[_PROGRESS] = self._progress

    def idle(self) -> None:
        if self._named:
            self._named = []
            self._words[_COUNT] = 0
        self._words[_PATIENCE] = _IDLE


@dataclass(frozen=True)
class FlightReading:
    """What the recorder held at one moment."""

    beats: int = 0
    """0 as long as the engine's process has not come so far as to count."""
    progress: int = 0
    patience: float | None = None
    """Seconds; None while there is no work."""
    requests: tuple[int, ...] = ()
    """Whom the work is for; empty if that is not known, or more than `MOST_NAMED`."""


class Recording:
    """The front's side: makes the memory, hands it to the engine as a file, and reads it."""

    def __init__(self) -> None:
        # Without a name in the file system, nobody can take it away.
        with tempfile.TemporaryFile(prefix="millrace-") as made:
            made.truncate(_BYTES)
            self.file = os.dup(made.fileno())
        self._map = mmap.mmap(self.file, _BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._words[_PATIENCE] = int(LOAD_PATIENCE * 1000)

    def read(self) -> FlightReading:
        beats, progress, patience, count, *names = self._words.tolist()
        return FlightReading(
            beats=beats,
            progress=progress,
            patience=None if patience == _IDLE else patience / 1000,
            requests=tuple(names[:count]) if count <= MOST_NAMED else (),
        )

    def close(self) -> None:
        if self.file >= 0:
            self._words.release()
            self._map.close()
            os.close(self.file)
            self.file = -1
