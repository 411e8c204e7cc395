"""A connection between two processes of a group, for threads that may wait: whole messages, each with its
length before it, after both sides have proved that they belong together."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable

from millrace.distributed import handshake
from millrace.distributed.handshake import (
    LENGTH,
    MOST_BYTES,
    MOST_GREETING,
    Hello,
    Refused,
    Welcome,
)

GREETING_SECONDS = 5.0


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """One message; raises OSError when the other side is gone."""
        self._socket.sendall(handshake.framed(data))

    def receive(self, most: int = MOST_BYTES) -> bytes | None:
        """The next message; None when the other side has closed."""
        head = self._exactly(LENGTH.size)
        if head is None:
            return None
        (length,) = LENGTH.unpack(head)
        if length > most:
            raise Refused(f"a message of {length} bytes is announced")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray(count)
        view, have = memoryview(parts), 0
        while have < count:
            more = self._socket.recv_into(view[have:])
            if not more:
                return None
            have += more
        return bytes(parts)

    @property
    def waits(self) -> bool:
        """Whether there is something to receive, or the end of it all."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait for something to receive, for so long at most."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def within(self, seconds: float | None) -> None:
        """How long anything may take from here on."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: tuple[str, int], secret: str, role: str, rank: int, seconds: float) -> Channel:
    """Raises OSError where nobody answers, Refused where somebody else does."""
    channel = Channel(socket.create_connection(address, timeout=seconds))
    try:
        said = handshake.hello(role, rank)
        channel.send(handshake.packed(said))
        channel.send(handshake.packed(handshake.prove(secret, said, _heard(channel))))
        welcome = _heard(channel)
        if not isinstance(welcome, Welcome) or welcome.problem:
            raise Refused(getattr(welcome, "problem", "it hung up"))
    except BaseException:
        channel.close()
        raise
    channel.within(None)
    return channel


def accept(
    listener: socket.socket, secret: str, allowed: Callable[[Hello], str | None]
) -> tuple[Hello, Channel]:
    """The next that proves to belong here; `allowed` says why one that does is not wanted now."""
    end, _ = listener.accept()
    channel = Channel(end)
    try:
        channel.within(GREETING_SECONDS)
        said, mine = handshake.answer(secret, _heard(channel))
        channel.send(handshake.packed(mine))
        handshake.check(secret, said, mine, _heard(channel))
        problem = allowed(said)
        channel.send(handshake.packed(Welcome(problem or "")))
        if problem:
            raise Refused(problem)
    except BaseException:
        channel.close()
        raise
    channel.within(None)
    return said, channel


def _heard(channel: Channel) -> handshake.Greeting:
    data = channel.receive(MOST_GREETING)
    if data is None:
        raise Refused("it hung up; its secret, or its hostfile, may be another one")
    return handshake.decode(data)
