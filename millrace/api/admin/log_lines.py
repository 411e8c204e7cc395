"""The server's log as a stream: the last lines, then those that come.

Lines are kept in a ring, which is all that a slow reader can cost; what it missed is told as a gap.
Engines are processes of their own and write to the terminal: their lines are not here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from types import NoneType
from typing import Any

from millrace import logs
from millrace.api.admin.feed import event
from millrace.api.answer import KEEP_ALIVE
from millrace.errors import Overloaded

MOST_LINES = 1000
MOST_LISTENERS = 64
_LONGEST = 10_000
"""Characters of a message, or of a trace."""


class LogLines(logging.Handler):
    """Lives beside the HTTP server, whose log it keeps from its start on."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=MOST_LINES)
        """Number, level and fields of each."""
        self._written = 0
        self._listeners = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        logging.getLogger().addHandler(self)

    def drain(self, seconds: float) -> None:
        logging.getLogger().removeHandler(self)
        self._closed = True
        self._wake.set()

    def cut(self) -> None:
        """Nothing is left to cut."""

    async def ended(self) -> None:
        """Streams end when they hear of it."""

    def emit(self, record: logging.LogRecord) -> None:
        plain = (str, int, float, NoneType)
        told = logs.fields_of(record).items()
        fields: dict[str, Any] = {k: v if isinstance(v, plain) else str(v) for k, v in told}
        for name in ("message", "trace"):
            if len(text := fields.get(name, "")) > _LONGEST:
                fields[name] = f"{text[:_LONGEST]}…"
        self._written += 1  # under the handler's lock, whichever thread this is
        self._lines.append((self._written, record.levelno, fields))
        if self._listeners and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()

    def listen(self) -> None:
        """Say that somebody listens from now on; `leave` must follow."""
        if self._listeners >= MOST_LISTENERS:
            raise Overloaded(f"{self._listeners} listen to the server's log already.")
        self._listeners += 1

    def leave(self) -> None:
        self._listeners -= 1

    async def events(self, level: int, tail: int, idle: float) -> AsyncIterator[bytes]:
        """The last `tail` lines from this level up, then all that come."""
        told, lines = self._after(0, level)
        for fields in lines[max(0, len(lines) - tail) :] if tail else []:
            yield event("line", fields)
        yield KEEP_ALIVE  # so that the headers leave, however little there is to tell
        while not self._closed:
            wake = self._wake
            if self._written > told:
                first = self._lines[0][0]
                if first > told + 1:
                    yield event("gap", {"missed": first - told - 1})
                told, lines = self._after(told, level)
                for fields in lines:
                    yield event("line", fields)
                # A write to a connection that is lost is a line of its own: without a turn of the event
                # loop, which notices the loss, each would be written there as well, without end.
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(idle):
                    await wake.wait()
            except TimeoutError:
                yield KEEP_ALIVE

    def _after(self, told: int, level: int) -> tuple[int, list[dict[str, Any]]]:
        """The number of the last line, and those after `told` that are of this level."""
        kept = list(self._lines)
        lines = [fields for number, of, fields in kept if number > told and of >= level]
        return (kept[-1][0] if kept else told), lines
