"""A limit on the bytes of request bodies that are being read, per caller and in total.

A client may send a large body slowly over many connections. Without a limit the unfinished bodies take
memory without bound. A body reserves its whole size before it is read, so bodies that have begun can always
finish. One for which there is no room waits, unread, and is refused after some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.caller import Departure, current_caller, current_departure
from millrace.errors import Overloaded
from millrace.heap import HeapTrimmer

SMALL = 64 * 1024
"""Bytes of a body that need no reservation: the HTTP layer buffers as many for every connection."""
PATIENCE = 10.0
"""Seconds that a body waits for room before it is refused."""
_TOTAL = 512 << 20
_PARTS = 4
"""One caller may use one part of this many."""
_LARGE = 1 << 20
"""Bytes of a body after which freed memory is returned to the system."""


@dataclass(eq=False)
class _Waiting:
    caller: str
    size: int
    granted: asyncio.Future[None]

    @property
    def is_granted(self) -> bool:
        done = self.granted.done() and not self.granted.cancelled()
        return done and self.granted.exception() is None

    def leave(self) -> None:
        """The client closed its connection."""
        if not self.granted.done():
            self.granted.set_exception(ClientDisconnect())


class BodyBudget:
    def __init__(self, total: int, per_caller: int, *, patience: float = PATIENCE) -> None:
        self.total = total
        self.per_caller = per_caller
        self.used = 0
        self._patience = patience
        self._by_caller: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()

    @contextlib.asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes for the current caller; raises Overloaded where there is no room in time."""
        if size <= SMALL:
            yield
            return
        caller = current_caller.get()
        await self._reserve(caller, size)
        try:
            yield
        finally:
            self._release(caller, size)

    async def _reserve(self, caller: str, size: int) -> None:
        loop = asyncio.get_running_loop()
        departure = current_departure.get() or Departure()
        mine = _Waiting(caller, size, loop.create_future())
        self._waiting.append(mine)
        self._grant()

        def leave() -> None:
            loop.call_soon_threadsafe(mine.leave)

        unsubscribe = departure.subscribe(leave)
        try:
            async with asyncio.timeout(self._patience):
                await mine.granted
        except BaseException as error:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif mine.is_granted:
                self._release(
                    caller, size
                )  # granted in the round of the loop in which it was cancelled
            self._grant()  # a smaller body may have waited behind this one
            if isinstance(error, TimeoutError):
                raise self._overloaded(caller, size) from None
            raise
        finally:
            unsubscribe()

    def _release(self, caller: str, size: int) -> None:
        self.used -= size
        self._by_caller[caller] -= size
        if not self._by_caller[caller]:
            del self._by_caller[caller]
        self._grant()

    def _grant(self) -> None:
        """Grant in order of arrival. A caller at its own limit does not hold up the others."""
        for waiting in list(self._waiting):
            if self._is_over(waiting.caller, waiting.size):
                continue
            if self.used + waiting.size > self.total:
                return
            self._waiting.remove(waiting)
            if waiting.granted.done():  # cancelled, or the client left
                continue
            self.used += waiting.size
            self._by_caller[waiting.caller] += waiting.size
            waiting.granted.set_result(None)

    def _is_over(self, caller: str, size: int) -> bool:
        return self._by_caller[caller] + size > self.per_caller

    def _overloaded(self, caller: str, size: int) -> Overloaded:
        if self._is_over(caller, size):
            return Overloaded(
                f"Other requests of this caller are still sending their bodies: with this one "
                f"they would have more than {self.per_caller} bytes, the limit for one caller. "
                f"Send large requests one after the other.",
                retry_after=self._patience,
            )
        return Overloaded(
            f"The server is reading as many large requests as it can hold ({self.total} bytes). "
            f"Try again in a moment.",
            retry_after=self._patience,
        )


def budget_for(max_body: int) -> BodyBudget:
    """The budget of a server with this limit for one body."""
    total = max(_TOTAL, _PARTS * max_body)
    return BodyBudget(total, total // _PARTS)


class TrimMiddleware:
    """Returns memory to the system after requests with large bodies, however they ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._trimmer = HeapTrimmer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope.get("state", {}).get("body_bytes", 0) >= _LARGE:
                self._trimmer.schedule()
