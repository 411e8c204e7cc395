"""Places that coroutines wait for, shared fairly between callers (millrace.fair_queue)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable

from millrace.caller import current_caller
from millrace.fair_queue import FairQueue, QueueFull


class FairPlace:
    """A place that is held."""

    def __init__(self, leave: Callable[[float], None]) -> None:
        self._leave: Callable[[float], None] | None = leave
        self._begun = time.monotonic()

    def leave(self) -> None:
        """Give the place to who waits; a second time has no effect."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(time.monotonic() - self._begun)


class FairSemaphore:
    """At most `per_caller` places are one caller's; `places` are all there are."""

    def __init__(
        self, places: int, *, per_caller: int, work: str, waiting_per_caller: int, waiting: int
    ) -> None:
        """`work` says in errors what is waited for, like `to have a picture fetched`."""
        self._free = places
        self._per_caller = per_caller
        self._work = work
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(
            per_caller=waiting_per_caller, total=waiting
        )

    @contextlib.asynccontextmanager
    async def place(self, expected: float = 0.0) -> AsyncIterator[None]:
        """Hold a place, for about `expected` seconds; raises Overloaded."""
        place = await self.enter(expected)
        try:
            yield
        finally:
            place.leave()

    async def enter(self, expected: float = 0.0) -> FairPlace:
        """A place, to be left by whoever gets it; raises Overloaded."""
        caller = current_caller.get()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            entry, displaced = self._queue.push(
                caller, turn, now=time.monotonic(), expected=expected
            )
        except QueueFull as full:
            raise full.overloaded(self._work) from None
        if displaced is not None and not displaced.item.done():
            displaced.item.set_exception(QueueFull(len(self._queue)).overloaded(self._work))
        self._grant()
        try:
            await turn
        except BaseException:
            # A turn that was granted and cancelled in the same round is given back.
            granted = turn.done() and not turn.cancelled() and turn.exception() is None
            if not self._queue.discard(entry) and granted:
                self._leave(caller, 0.0)
            raise
        return FairPlace(functools.partial(self._leave, caller))

    def _leave(self, caller: str, seconds: float) -> None:
        self._free += 1
        self._queue.end(caller, seconds)
        self._grant()

    def _grant(self) -> None:
        while self._free:
            entry = self._queue.pop(lambda c: self._queue.running(c) < self._per_caller)
            if entry is None:
                return
            if entry.item.done():  # cancelled meanwhile
                self._queue.end(entry.caller, 0.0)
                continue
            self._free -= 1
            entry.item.set_result(None)
