"""One reader of many requests: which of them has something to read.

A task per request would do the same, and cost the event loop more than what is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol


class EventSource(Protocol):
    idle: float
    """Seconds without anything to read after which its reader is to be told so."""
    on_arrival: Callable[[], None]
    """Called when there is something to read, or nothing more to come."""


class Arrivals:
    def __init__(self, sources: Sequence[EventSource]) -> None:
        """Each is looked at once at the beginning: something may have come before."""
        self._idle = min(source.idle for source in sources)
        self._ready = deque(range(len(sources)))
        self._queued = bytearray(b"\1" * len(sources))
        """Whether each is among those that are ready."""
        self._any = asyncio.Event()
        for number, source in enumerate(sources):
            source.on_arrival = partial(self._note, number)

    def _note(self, number: int) -> None:
        if not self._queued[number]:
            self._queued[number] = True
            self._ready.append(number)
            self._any.set()

    async def next(self) -> int | None:
        """The number of the next source to read from; None if nothing came for a while."""
        if not self._ready:
            self._any.clear()
            try:
                async with asyncio.timeout(self._idle):
                    await self._any.wait()
            except TimeoutError:
                return None
        number = self._ready.popleft()
        self._queued[number] = False
        return number
