"""Running an answer through its machine: the one loop behind streamed, whole and background ones."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from millrace.api.answer import KEEP_ALIVE, one_line
from millrace.api.responses.machine import Machine
from millrace.api.responses.parts import Wire
from millrace.errors import MillraceError, RequestFailed, StorageUnavailable
from millrace.serving.running import Running
from millrace.text.deltas import Idle

log = logging.getLogger("millrace.api")

Save = Callable[[list[Wire]], Awaitable[None]]
"""Keeps the finished response; the wire events are its last, which have not been sent."""


def encode(event: Wire) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), one_line(event))


@dataclass
class Answering:
    machine: Machine
    running: Running
    save: Save

    async def events(self) -> AsyncIterator[Wire | None]:
        """All wire events, the last of them after the response is kept; None when nothing comes."""
        machine = self.machine
        for event in machine.begin():
            yield event
        try:
            async for happened in self.running.events():
                if isinstance(happened, Idle):
                    yield None
                for event in machine.feed(happened):
                    yield event
            end = machine.end()
        except Exception as error:
            last = await self._failed(error)
        else:
            last = [await self._kept(end)]
        for event in last:
            yield event

    async def _kept(self, end: Wire) -> Wire:
        """The last event after the response is kept; one that cannot be kept is delivered all the same."""
        try:
            await self.save([end])
        except Exception as error:
            if not isinstance(error, MillraceError):
                log.exception("a response was not kept")
                error = StorageUnavailable("The server met an unexpected error in the store.")
            log.warning("the response %s was not kept: %s", end["response"]["id"], error.message)
            self.machine.not_stored(error)
            return end | {"response": self.machine.response()}
        return end

    async def _failed(self, error: Exception) -> list[Wire]:
        if not isinstance(error, MillraceError):
            log.exception("an answer broke")
            error = RequestFailed("The server met an unexpected error in this answer.")
        last = self.machine.fail(error)
        try:
            await self.save(last)
        except MillraceError as second:
            log.warning("a failed response was not kept: %s", second.message)
        return last

    async def stream(self) -> AsyncIterator[bytes]:
        async for event in self.events():
            yield KEEP_ALIVE if event is None else encode(event)

    async def whole(self) -> Machine:
        """The machine at its end; raises what went wrong."""
        async for _ in self.events():
            pass
        if self.machine.error is not None:
            raise self.machine.error
        return self.machine
