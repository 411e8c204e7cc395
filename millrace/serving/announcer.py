"""This server's record for other programs on the machine, with the memory that it holds now."""

from __future__ import annotations

import asyncio
import contextlib

from millrace.servers import Registration
from millrace.serving.memory import server_memory
from millrace.serving.registry import Registry

_PERIOD = 1.0


class Announcer:
    """Lives beside the HTTP server, and keeps the record's figures up to date."""

    def __init__(self, registration: Registration, registry: Registry) -> None:
        self._registration = registration
        self._registry = registry
        self._ticking: asyncio.Task[None] | None = None

    def look(self) -> None:
        self._registration.update(server_memory(self._registry.instances()))

    async def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    def drain(self, seconds: float) -> None:
        """The record stays until the server has ended: its memory is not free before."""

    def cut(self) -> None:
        """Nothing is left to cut."""

    async def ended(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_PERIOD)
