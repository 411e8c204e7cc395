"""How many connections are open: in all, and of each client address. More are refused.

A client that opens connections without end would take the descriptors that others, and engines that start,
need. Whoever is refused is told so, in the shape of the protocol that it speaks, and let go.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter
from typing import Any

import msgspec

from millrace.api.errors import shape_of
from millrace.api.http1_rules import LARGEST_CHUNK
from millrace.api.reader_watch import WatchedProtocol
from millrace.errors import MillraceError, Overloaded

log = logging.getLogger("millrace.api")

_RESERVE = 96
"""Descriptors that are never a connection's: of the server itself, of engines that start, of files."""
_RESERVED_PART = 8
"""As a part of all, where that is more."""
_MOST_REFUSED = 32
"""Refused connections that are still open, so that they hear why; the rest is closed without a word."""
_REFUSAL_SECONDS = 2.0
_QUIET_SECONDS = 60.0
"""Between two lines of the log that say the same."""


class TooManyConnections(Overloaded):
    code = "too_many_connections"


class ServerFull(Overloaded):
    """The server has no descriptor for another connection."""

    code = "too_many_connections"
    status = 503


class ConnectionCount:
    """The connections that are open."""

    def __init__(self, descriptors: int, each: int | None = None) -> None:
        """`each` is how many an address may have; None gives it half of the descriptors, 0 all."""
        self.most = max(8, descriptors - max(_RESERVE, descriptors // _RESERVED_PART))
        self.each = (descriptors // 2 if each is None else each) or self.most
        self.refused = 0
        """Those that are refused and still open."""
        self.open = 0
        self._by_address: Counter[str] = Counter()
        self._logged: dict[type[MillraceError], float] = {}

    def enter(self, address: str) -> MillraceError | None:
        """Count a connection, or return why it is refused."""
        error: MillraceError | None = None
        if self.open >= self.most:
            error = ServerFull(
                f"The server has {self.open} open connections, which is all that its limit of open "
                "files allows. Try again in a moment."
            )
        elif address and self._by_address[address] >= self.each:
            error = TooManyConnections(
                f"{address} has {self._by_address[address]} open connections to this server, which "
                "is all that one address may have (--max-connections-per-address). Close some, or "
                "use them for several requests."
            )
        if error is None:
            self.open += 1
            self._by_address[address] += 1
        else:
            self._note(error)
        return error

    def leave(self, address: str) -> None:
        self.open -= 1
        self._by_address[address] -= 1
        if self._by_address[address] <= 0:
            del self._by_address[address]

    def _note(self, error: MillraceError) -> None:
        now = time.monotonic()
        if now > self._logged.get(type(error), -_QUIET_SECONDS) + _QUIET_SECONDS:
            self._logged[type(error)] = now
            log.warning("connections are refused: %s", error.message)


def address_of(peer: Any) -> str:
    """Whose connection it is: an IPv4 address, or the network of an IPv6 one."""
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except (TypeError, ValueError, IndexError, AttributeError):
        return ""  # a socket of this machine's, whose peers have no address
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


class CountedProtocol(WatchedProtocol):
    count = ConnectionCount(1024)
    _address: str | None = None
    """Whose connection is counted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address = address_of(transport.get_extra_info("peername"))
        refusal = self.count.enter(address)
        if refusal is None:
            self._address = address
            super().connection_made(transport)
        else:
            refused = _Refused(self.count, refusal)
            transport.set_protocol(refused)
            refused.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self.count.leave(self._address)
            self._address = None
        super().connection_lost(exc)


class _Refused(asyncio.Protocol):
    """A connection that hears why it is refused: once it has asked, in the words of what it asked for."""

    def __init__(self, count: ConnectionCount, error: MillraceError) -> None:
        self._count = count
        self._error = error
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.TimerHandle | None = None
        self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._count.refused += 1
        if self._count.refused > _MOST_REFUSED:
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(_REFUSAL_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if not self._told and self._transport is not None:
            self._told = True
            self._transport.write(_answer(self._error, data))
            # What is still on its way is read and dropped: a reset would take the answer along.
            self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._count.refused -= 1
        if self._end is not None:
            self._end.cancel()


def _answer(error: MillraceError, head: bytes) -> bytes:
    words = head[:4096].split(b" ", 2)
    path = words[1].decode("ascii", "replace") if len(words) > 2 else "/"
    body = msgspec.json.encode(shape_of(path)(error))
    status = b"503 Service Unavailable" if error.status == 503 else b"429 Too Many Requests"
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"retry-after: 1\r\nconnection: close\r\n\r\n" % (status, len(body))
    ) + body


def counted_protocol(
    reader_timeout: float, count: ConnectionCount, largest_chunk: int = LARGEST_CHUNK
) -> type[CountedProtocol]:
    own = {"reader_timeout": reader_timeout, "count": count, "largest_chunk": largest_chunk}
    return type("CountedProtocol", (CountedProtocol,), own)
