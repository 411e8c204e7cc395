"""HTTP/1.1 at the socket: malformed requests are refused (http1_rules.py), and connections of clients that
stop sending in the middle of a request are closed.

uvicorn's protocol does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from millrace.api.errors import shape_of
from millrace.api.http1_rules import LARGEST_CHUNK, LARGEST_HEAD, StrictConnection
from millrace.errors import BadRequest, MillraceError, RequestTooLarge, ShuttingDown

_DEAD_AFTER = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""When the system gives up a peer that does not answer, in seconds and probes."""


class HttpProtocol(H11Protocol):
    first_byte = 75.0
    """Seconds that a new connection may be silent; later ones are uvicorn's keep-alive."""
    head_time = 30.0
    """Seconds from the first byte of a request to the end of its headers."""
    body_time = 60.0
    body_least = 1024
    body_periods = 64
    """Seconds in which a body must bring `body_least` bytes, and this part of its size: what is read of a
    large body takes memory until its end."""
    largest_chunk = LARGEST_CHUNK
    """Bytes that one chunk of a body may have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        largest_head = self.config.h11_max_incomplete_event_size or LARGEST_HEAD
        self._strict = StrictConnection(largest_head, self.largest_chunk)
        self.conn = self._strict
        self._watch: asyncio.TimerHandle | None = None
        self._watched: object = None
        """What the watch is for: a silent connection, a head, or the body of one request."""
        self._received = 0
        """Bytes since the watch was armed."""
        self._read_before = 0
        """Bytes of the watched body before that."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _notice_death(transport.get_extra_info("socket"))
        self._arm(h11.IDLE, self.first_byte)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._look(self._strict.is_begun)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look(self._strict.is_begun)

    def _should_upgrade(self) -> bool:
        """Never, whether or not a library for WebSockets is installed: a connection that became one would
        leave the limits of this class. The request is answered as if it had not asked."""
        return False

    def send_400_response(self, msg: str) -> None:
        self._refuse(_error(*self._strict.why_refused()))

    def shutdown(self) -> None:
        """Called when the server stops. A request whose body is incomplete is refused at once: nothing
        has been started for it, and its client may take as long as it likes to send the rest."""
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._refuse(ShuttingDown("The server is shutting down."))
        else:
            super().shutdown()

    def _look(self, begun: bool) -> None:
        """Watch what is awaited from the client now, if anything is."""
        if self.transport.is_closing():
            self._disarm()
        elif self.conn.their_state is h11.IDLE:
            if not begun:
                self._disarm()
            elif self._watched is not h11.Request:
                self._arm(h11.Request, self.head_time)
        elif self.conn.their_state is h11.SEND_BODY:
            if self._watched is not self.cycle:
                self._received = self._read_before = 0
                self._arm(self.cycle, self.body_time)
        else:
            self._disarm()

    def _arm(self, what: object, seconds: float) -> None:
        self._disarm()
        self._watched = what
        self._watch = self.loop.call_later(seconds, self._expired)

    def _disarm(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._watched = None

    def _expired(self) -> None:
        # Where we have stopped reading, the client is not to blame.
        body = self._watched is self.cycle and self.cycle is not None
        if body and (self.flow.read_paused or self._received >= self._least()):
            self._read_before += self._received
            self._received = 0
            self._arm(self.cycle, self.body_time)
        elif self._watched is h11.IDLE:
            self._disarm()
            self.transport.close()
        else:
            self._refuse(_error(408, "The request did not arrive in time."))

    def _least(self) -> int:
        """Bytes that the body must bring in `body_time`."""
        declared = next((int(v) for k, v in self.headers if k == b"content-length"), 0)
        size = max(declared, self._read_before + self._received)
        return max(self.body_least, size // self.body_periods)

    def _refuse(self, error: MillraceError) -> None:
        """The last response of this connection, in the shape of the path that was asked for, if any."""
        self._disarm()
        path = ""
        if self.cycle is not None and not self.cycle.response_complete:
            path = self.cycle.scope["path"]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # Nothing can be said where an answer is on its way already.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = error.status
            body = msgspec.json.encode(shape_of(path)(error))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            if isinstance(error, ShuttingDown):
                headers.append(("retry-after", "1"))
            reason = http.HTTPStatus(status).phrase.encode()
            answer = h11.Response(status_code=status, headers=headers, reason=reason)
            said = () if self._strict.is_head else (h11.Data(data=body),)
            for event in (answer, *said, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _error(status: int, message: str) -> MillraceError:
    error = RequestTooLarge(message) if status == 413 else BadRequest(message)
    error.status = status
    return error


def _notice_death(connection: socket.socket | None) -> None:
    """Have the system tell when the peer is gone without a word."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _DEAD_AFTER.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
