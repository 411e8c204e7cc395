"""A limit on the calls whose request message is still arriving.

gRPC buffers the whole message of a call before its handler runs, up to the server's limit for one message.
A client that sends many large messages and finishes none would take memory without bound. The message of a
call is not read before the call has one of a few places, and it must be complete within a time. One caller
has no more than a part of the places, where keys tell callers apart.
"""

from __future__ import annotations

import asyncio

from millrace.errors import Overloaded
from millrace.fair_semaphore import FairPlace, FairSemaphore

PLACES = 16
_OF_ONE_CALLER = 3 / 4
_WAITING_PER_CALLER, _WAITING = 4096, 16384
PATIENCE = 10.0
"""Seconds that a call waits for a place before it is refused."""
ARRIVAL_SECONDS = 60.0
"""In which a message must be complete."""


class Arrival:
    """The place of one call, held until its message is complete or the call ends."""

    def __init__(self, arrivals: MessageArrivals, place: FairPlace, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._arrivals = arrivals
        self._place = place
        self._timer = asyncio.get_running_loop().call_later(seconds, task.cancel)
        # The handler never runs for a call that is cancelled before its message is complete.
        task.add_done_callback(self._release)

    def complete(self) -> None:
        """The message has arrived."""
        self._release()

    def _release(self, task: object = None) -> None:
        self._timer.cancel()
        self._task.remove_done_callback(self._release)
        self._place.leave()
        self._arrivals.held.discard(self)

    def cut(self) -> None:
        """End the call."""
        self._task.cancel()


class MessageArrivals:
    def __init__(
        self,
        places: int = PLACES,
        *,
        keyed: bool = False,
        patience: float = PATIENCE,
        seconds: float = ARRIVAL_SECONDS,
    ) -> None:
        """`keyed` says that callers have keys: before its message is read, no more is known of one."""
        self._places = FairSemaphore(
            places,
            per_caller=int(places * _OF_ONE_CALLER) if keyed else places,
            work="to send a message",
            waiting_per_caller=_WAITING_PER_CALLER,
            waiting=_WAITING,
        )
        self._patience = patience
        self._seconds = seconds
        self.held: set[Arrival] = set()

    async def begin(self) -> Arrival:
        """A place for the call of the current task and caller; raises Overloaded where none is free in
        time."""
        try:
            async with asyncio.timeout(self._patience):
                place = await self._places.enter()
        except TimeoutError:
            raise Overloaded(
                "The server waits for the messages of too many other calls. Try again in a moment.",
                retry_after=self._patience,
            ) from None
        arrival = Arrival(self, place, self._seconds)
        self.held.add(arrival)
        return arrival

    def cut(self) -> None:
        """End all calls whose message is incomplete, for a server that ends."""
        for arrival in list(self.held):
            arrival.cut()
