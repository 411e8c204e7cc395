"""Requests go in one after the other, and streams go on between them.

An event loop runs all that is ready before it looks for more: two hundred requests that come at once would
be read, checked and handed on in one go, some milliseconds each, and no stream would get a word meanwhile.
Whoever comes by himself does not wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send


class TurnstileMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False
        """Somebody went in, and the loop has not been round since."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._pass()
        await self._app(scope, receive, send)

    async def _pass(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next one in; called once in each round of the loop."""
        while self._waiting:
            next_in = self._waiting.popleft()
            if not next_in.done():
                next_in.set_result(None)
                loop.call_soon(self._turn, loop)
                return
        self._turning = False
