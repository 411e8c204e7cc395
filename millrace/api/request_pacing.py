"""Requests go in one after the other, and clients that leave go out so; streams go on between them.

An event loop runs all that is ready before it looks for more: two hundred requests that come at once would
be read, checked and handed on in one go, some milliseconds each, and no stream would get a word meanwhile.
Two hundred clients that are gone at once would be let go of so, a third of a millisecond each.
Where cores are few, the engine's threads wait for one another whenever the loop has one of their cores: a
crowd takes no more than a share of it there. Whoever comes by himself does not wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.models.blas import usable_cores

FEW_CORES = 4
"""With more, the engine has cores of its own."""
SHARE = 0.4
"""What a crowd may have of a core."""
LONGEST_PAUSE = 0.02
"""Seconds that the next of a crowd waits at most, since streams use the loop as well."""

_LOOKS = ("GET", "HEAD")


class RequestPacer:
    def __init__(self, share: float) -> None:
        """`share` is what the loop may use of a core while a crowd goes through."""
        self._share = share
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False
        """Somebody went through, and the loop has not been round since."""
        self._let_in = self._worked = 0.0
        """When that was, and what the loop's thread had worked until then."""

    async def passed(self) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            self._count(loop)
            loop.call_soon(self._turn, loop)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        """Somebody goes through now."""
        self._let_in, self._worked = loop.time(), time.thread_time()

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next one through, now or when the loop has rested; called once in each round of it."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if not self._waiting:
            self._turning = False
            return
        worked, passed = time.thread_time() - self._worked, loop.time() - self._let_in
        pause = min(worked / self._share, LONGEST_PAUSE) - passed
        if self._share < 1 and pause > 0:
            loop.call_later(pause, self._turn, loop)
            return
        self._count(loop)
        self._waiting.popleft().set_result(None)
        loop.call_soon(self._turn, loop)


class RequestPacingMiddleware:
    def __init__(self, app: ASGIApp, share: float | None = None) -> None:
        share = share or (SHARE if usable_cores() <= FEW_CORES else 1.0)
        self._app = app
        self._entry = RequestPacer(share)
        self._look = RequestPacer(1.0)
        """Who only looks, a probe of a thousand waiting clients' server say, does not queue behind them."""
        self._exit = RequestPacer(share)
        """Nor does who leaves early: what works for him stops."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await self._exit.passed()
            return message

        await (self._look if scope["method"] in _LOOKS else self._entry).passed()
        await self._app(scope, received, send)
