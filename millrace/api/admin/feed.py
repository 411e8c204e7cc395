"""The server's status as a stream: one snapshot a second, made once for all who may see the same.

A ring of the last ten minutes is kept whether anybody listens or not, so that plots start full. Who
reads slowly misses snapshots, and holds nobody up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from millrace.api.admin.status import StatusView, status_of
from millrace.api.answer import one_line
from millrace.errors import Overloaded
from millrace.serving.history import History, HistorySample
from millrace.serving.metrics import Metrics
from millrace.serving.registry import Registry

MOST_LISTENERS = 64
_PERIOD = 1.0


class Feed:
    """Lives beside the HTTP server: started with it, and ended first, since its streams never end."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics
        self._history = History()
        self._listeners = 0
        self._latest: HistorySample | None = None
        self._made: dict[str | None, bytes] = {}
        """The latest snapshot by who is shown it."""
        self._ticked = asyncio.Event()
        self._closed = False
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    def drain(self, seconds: float) -> None:
        self._closed = True
        self._ticked.set()
        if self._ticking is not None:
            self._ticking.cancel()

    def cut(self) -> None:
        """Nothing is left to cut."""

    async def ended(self) -> None:
        """Streams end when they hear of it."""

    def listen(self) -> None:
        """Say that somebody listens from now on; `leave` must follow."""
        if self._listeners >= MOST_LISTENERS:
            raise Overloaded(f"{self._listeners} listen to the server's status already.")
        self._listeners += 1

    def leave(self) -> None:
        self._listeners -= 1

    async def events(self, view: StatusView) -> AsyncIterator[bytes]:
        yield event("history", {"samples": self._history.columns()})
        if self._history.samples:
            yield self._snapshot(self._history.samples[-1], view)
        while not self._closed:
            await self._ticked.wait()
            if self._closed:
                return
            yield self._shown(view)

    async def _tick(self) -> None:
        before = due = time.monotonic()
        while True:
            due += _PERIOD
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            # A loop that was held up does not catch up: late is late.
            due = max(due, now - _PERIOD)
            self._sample(now - before)
            before = now

    def _sample(self, elapsed: float) -> None:
        running = waiting = 0
        for instance in self._registry.instances():
            for active in instance.client.in_flight.values():
                if active.first_token is None:
                    waiting += 1
                else:
                    running += 1
        reading = self._metrics.reading(running, waiting, self._registry.reserved)
        sample = self._history.record(time.time(), elapsed, reading)
        if self._listeners:
            self._latest, self._made = sample, {}
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()

    def _shown(self, view: StatusView) -> bytes:
        """The latest snapshot, which the first who may see it has made."""
        assert self._latest is not None
        if (made := self._made.get(view.viewer)) is None:
            made = self._made[view.viewer] = self._snapshot(self._latest, view)
        return made

    def _snapshot(self, sample: HistorySample, view: StatusView) -> bytes:
        return event("status", status_of(self._registry, view) | {"sample": sample})


def event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + one_line(value) + b"\n\n"
