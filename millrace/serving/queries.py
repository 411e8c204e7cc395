"""Questions to an engine that are no requests: what its prefix cache holds, and what becomes of it.

An engine answers between two steps. What it does not answer, because it is busy or gone, is told to who
asked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from millrace.errors import EngineUnavailable
from millrace.protocol.prefixes import AllGone, CacheChange, CacheChanged, CacheQuery, CacheReport

PATIENCE = 30.0
"""Seconds that the engine may take to answer."""


async def patiently(start: Awaitable[None]) -> None:
    """Wait for an engine that starts no longer than for the answer of one that has."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            await start


def not_ready(state: str) -> EngineUnavailable:
    return EngineUnavailable(f"The engine is {state}; ask again when it is ready.")


class CacheQueries:
    def __init__(self, send: Callable[[CacheQuery], None]) -> None:
        self._send = send
        self._open: dict[str, asyncio.Future[CacheReport]] = {}
        self._ids = map(str, itertools.count())
        self.on_change: Callable[[Sequence[CacheChange]], None] = lambda _: None
        """Receives what becomes of the cache, where the engine tells it."""

    async def ask(self, *, clear: bool) -> CacheReport:
        id = next(self._ids)
        answer: asyncio.Future[CacheReport] = asyncio.get_running_loop().create_future()
        self._open[id] = answer
        self._send(CacheQuery(id, clear))
        try:
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            raise EngineUnavailable("The engine is too busy to answer; ask again later.") from None
        finally:
            del self._open[id]

    def heard(self, message: CacheReport | CacheChanged) -> None:
        if isinstance(message, CacheChanged):
            self.on_change(message.changes)
        elif (answer := self._open.get(message.id)) and not answer.done():
            answer.set_result(message)

    def drop(self) -> None:
        """The engine is gone, and its cache with it."""
        self.on_change([AllGone()])
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("The engine ended before it answered."))
