"""Clients that stop reading: their connection ends after a while, and their request with it.

While a client's buffers are full, its answer waits at its source, put together (see in_flight.py).
Progress is counted in bytes that the client's system has taken, so a slow reader is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios

from millrace.api.http1 import HttpProtocol
from millrace.caller import Departure

log = logging.getLogger("millrace.api")


class WatchedProtocol(HttpProtocol):
    reader_timeout = 60.0
    """Seconds without a byte taken, while more waits than the buffers hold."""
    send_buffer = 128 * 1024
    """Bytes that the system is to hold for a client; left alone, it would take megabytes for each."""
    _patience: asyncio.TimerHandle | None = None
    _untaken = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._be_patient()

    def resume_writing(self) -> None:
        self._lose_interest()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose_interest()
        super().connection_lost(exc)
        scope = self.cycle.scope if self.cycle is not None else {}
        departure = scope.get("state", {}).get("departure")
        if isinstance(departure, Departure):
            departure.set()

    def _be_patient(self) -> None:
        self._lose_interest()
        self._untaken = _untaken(self.transport)
        self._patience = self.loop.call_later(self.reader_timeout, self._look_again)

    def _lose_interest(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _look_again(self) -> None:
        if _untaken(self.transport) < self._untaken:
            self._be_patient()
            return
        log.info("a client has not read for %g s; its connection ends", self.reader_timeout)
        self.transport.abort()


def _untaken(transport: asyncio.Transport) -> int:
    """Bytes that were written and that the client's system has not taken."""
    waiting: int = transport.get_write_buffer_size()
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return waiting
    try:
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:
        return waiting  # not every system tells how much it holds
    (count,) = struct.unpack("i", queued)
    return waiting + int(count)
