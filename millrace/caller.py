"""The caller of the request that is being served, and whether its client is still there.

For queues that share work between callers. The caller is the id of a key, or the client's address on a
server without keys. Set where a request enters (HTTP, gRPC); tasks and `asyncio.to_thread` carry both
along. Outside of requests the caller is empty and there is no departure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar


class Departure:
    """Whether a client has closed its connection. Work that waits for it subscribes, from any thread."""

    def __init__(self) -> None:
        self.gone = False
        self._lock = threading.Lock()
        self._calls: dict[object, Callable[[], None]] = {}

    def set(self) -> None:
        with self._lock:
            self.gone = True
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call()

    def subscribe(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called once the client is gone; returns what takes that back."""
        key = object()
        with self._lock:
            self._calls[key] = call
        return lambda: self._unsubscribe(key)

    def _unsubscribe(self, key: object) -> None:
        with self._lock:
            self._calls.pop(key, None)


current_caller: ContextVar[str] = ContextVar("current_caller", default="")
current_departure: ContextVar[Departure | None] = ContextVar("current_departure", default=None)
