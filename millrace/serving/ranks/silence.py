"""How long somebody has not been heard of, as far as whoever listens was there to hear.

A machine that stalls wakes its processes one after the other: the first would take its own sleep for the
others' silence, and end them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from millrace.distributed.messages import BEAT_SECONDS

MOST_SECONDS = 2 * BEAT_SECONDS
"""What one look can tell of."""


class Silence:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._seconds = 0.0

    def broken(self) -> None:
        """It was heard of."""
        self._looked, self._seconds = self._clock(), 0.0

    def look(self) -> float:
        """Seconds; to be asked for at every beat."""
        now = self._clock()
        self._seconds += min(now - self._looked, MOST_SECONDS)
        self._looked = now
        return self._seconds
