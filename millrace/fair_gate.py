"""Places that threads wait for, shared fairly between callers (millrace.fair_queue)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from millrace.caller import Departure, current_caller, current_departure
from millrace.errors import Cancelled, EngineUnavailable
from millrace.fair_queue import FairQueue, QueueFull


class _Turn:
    """One thread's wait for a place."""

    granted = False
    refused: QueueFull | None = None

    @property
    def over(self) -> bool:
        return self.granted or self.refused is not None


class FairGate:
    """At most `per_caller` places are one caller's; `places` are all there are."""

    def __init__(
        self,
        places: int,
        *,
        per_caller: int,
        work: str,
        waiting_per_caller: int = 16,
        waiting: int = 128,
    ) -> None:
        """`work` says in errors what is waited for, like `to have a prompt read`."""
        self._places = places
        self._per_caller = per_caller
        self._work = work
        self._running = 0
        self._queue: FairQueue[_Turn] = FairQueue(per_caller=waiting_per_caller, total=waiting)
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def place(self, expected: float = 0.0) -> Iterator[None]:
        """Hold a place, for about `expected` seconds; raises Overloaded."""
        caller = current_caller.get()
        self._wait(caller, expected)
        begun = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._queue.end(caller, time.monotonic() - begun)
                self._grant()

    def close(self) -> None:
        """Refuse all that wait, and all that come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, caller: str, expected: float) -> None:
        turn, departure = _Turn(), current_departure.get() or Departure()
        unsubscribe = departure.subscribe(self._wake)
        try:
            self._take_turn(caller, expected, turn, departure)
        finally:
            unsubscribe()

    def _take_turn(self, caller: str, expected: float, turn: _Turn, departure: Departure) -> None:
        with self._changed:
            try:
                entry, displaced = self._queue.push(
                    caller, turn, now=time.monotonic(), expected=expected
                )
            except QueueFull as full:
                raise full.overloaded(self._work) from None
            if displaced is not None:
                displaced.item.refused = QueueFull(len(self._queue))
            self._grant()
            self._changed.wait_for(lambda: turn.over or self._closed or departure.gone)
            if turn.refused is not None:
                raise turn.refused.overloaded(self._work)
            if self._closed or departure.gone:
                if not self._queue.discard(entry):
                    self._running -= 1
                    self._queue.end(caller, 0.0)
                    self._grant()
                if self._closed:
                    raise EngineUnavailable("The server is shutting down.")
                raise Cancelled("The client is gone.")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _grant(self) -> None:
        while self._running < self._places:
            entry = self._queue.pop(lambda c: self._queue.running(c) < self._per_caller)
            if entry is None:
                break
            entry.item.granted = True
            self._running += 1
        self._changed.notify_all()
