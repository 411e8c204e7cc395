"""Whether an engine that has not ended still works: frozen, stuck, or only busy.

`Watch` judges by what the flight recorder held each time it was looked at. It knows neither
processes nor requests; whoever looks says what time it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from millrace.flight import FlightReading

LOOK_SECONDS = 1.0
JUMP_SECONDS = 4.0
"""A longer time between two looks: it was the front that slept, and what it missed tells nothing."""
MOST_SECONDS = 2.0
"""What one look can tell of: of a machine that stalled, the front may be the first to wake."""
FIRST_BEAT_SECONDS = 60.0
"""A process may take so long to come to its first line, on a machine that has much else to do."""
QUIET_SECONDS = 3.0
FROZEN_SECONDS = 8.0
LEAST_PATIENCE = 10.0
BUSY_SHARE = 0.05
"""Of a core: a process that computes this much is not frozen, even if its heart cannot beat (a call
that does not let go of Python's lock)."""


BUSY_SECONDS = 120.0
"""Silence after which it does not matter how much the process computes: no call of ours holds the lock
that long."""


class Pulse(enum.Enum):
    WELL = enum.auto()
    QUIET = enum.auto()
    """It has not been heard for a while."""
    FROZEN = enum.auto()
    STUCK = enum.auto()


@dataclass
class Watch:
    processor_time: Callable[[], float | None] = lambda: None
    """Seconds that the process has computed; None if that cannot be told."""
    frozen: float = FROZEN_SECONDS
    """Seconds of silence after which it is believed to be."""
    _reading: FlightReading = field(default_factory=FlightReading)
    _looked: float | None = None
    _silent: float = 0.0
    """Seconds without a heartbeat."""
    _still: float = 0.0
    """Seconds of heartbeats without progress."""
    _computed: float | None = None
    """What the process had computed when it fell silent."""

    def look(self, now: float, reading: FlightReading) -> Pulse:
        before, self._reading = self._reading, reading
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if passed > JUMP_SECONDS:
            self._silent = self._still = 0.0
            return Pulse.WELL
        passed = min(passed, MOST_SECONDS)
        beats = reading.beats != before.beats
        if reading.progress != before.progress or reading.patience is None:
            self._still = 0.0
        elif beats:
            # Only these count: who is frozen is not stuck as well.
            self._still += passed
        if beats or passed == 0.0:
            self._silent = 0.0
        else:
            if self._silent == 0.0:
                self._computed = self.processor_time()
            self._silent += passed
        if self._silent_for(self.frozen if reading.beats else FIRST_BEAT_SECONDS):
            return Pulse.FROZEN
        if reading.patience is not None and self._still > max(LEAST_PATIENCE, reading.patience):
            return Pulse.STUCK
        return Pulse.QUIET if reading.beats and self._silent_for(QUIET_SECONDS) else Pulse.WELL

    def _silent_for(self, seconds: float) -> bool:
        if self._silent < seconds:
            return False
        computed = self.processor_time()
        if computed is None or self._computed is None or self._silent > BUSY_SECONDS:
            return True
        return computed - self._computed < BUSY_SHARE * self._silent


def processor_time(pid: int) -> float | None:
    """Seconds that a process has computed so far, or wanted to, where the system tells it in a file.

    One that waits for a core which others have is not frozen, and a restart would get no more of it.
    """
    if sys.platform != "linux":
        return None
    try:
        # The name, in parentheses, may hold anything; the fields after it are counted from there.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        computed = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return computed + _waited(pid)


def _waited(pid: int) -> float:
    """Seconds that a process's threads have waited for a core; 0 where the system does not count them."""
    total = 0
    for counted in Path("/proc").glob(f"{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # threads come and go
            total += int(counted.read_text().split()[1])
    return total / 1e9


async def until_ill(
    read: Callable[[], FlightReading],
    watch: Watch,
    notice: Callable[[Pulse], None],
    every: float = LOOK_SECONDS,
) -> Pulse:
    """Look again and again, and return what is wrong once the engine has to be ended."""
    clock = asyncio.get_running_loop().time
    last = Pulse.WELL
    while True:
        pulse = watch.look(clock(), read())
        if pulse in (Pulse.FROZEN, Pulse.STUCK):
            return pulse
        if pulse is not last:
            notice(pulse)
            last = pulse
        await asyncio.sleep(every)
