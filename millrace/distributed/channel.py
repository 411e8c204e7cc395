"""A connection between two processes of a group, for threads that may wait: whole messages, each with its
length before it, after both sides have proved that they belong together."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import select
import socket
import threading
import time

from millrace.distributed import handshake
from millrace.distributed.greetings import Greetings, UnprovenCaller
from millrace.distributed.handshake import (
    LENGTH,
    MOST_BYTES,
    MOST_GREETING,
    Hello,
    Refused,
    Welcome,
)

log = logging.getLogger("millrace.ranks")

GREETING_SECONDS = 5.0
_MOST_GREETINGS = 64
"""Handshakes that run at a time."""
_LOOK = 0.5
"""Seconds between looks at whether a door is closed."""


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._deadline: float | None = None
        self.proof = b""
        """Of this side as the listener: sent with the welcome."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """One message; raises OSError when the other side is gone."""
        self._hurry()
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
            self._hurry()
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
        """How long all that follows may take together; TimeoutError after that."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def _hurry(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: tuple[str, int], secret: str, role: str, rank: int, seconds: float) -> Channel:
    """Raises OSError where nobody answers, Refused where somebody else does."""
    channel = Channel(socket.create_connection(address, timeout=seconds))
    try:
        channel.within(seconds)
        said = handshake.hello(role, rank)
        channel.send(handshake.packed(said))
        theirs, proof = handshake.prove(secret, said, _heard(channel))
        channel.send(handshake.packed(proof))
        handshake.confirm(secret, said, theirs, _heard(channel))
    except BaseException:
        channel.close()
        raise
    channel.within(None)
    return channel


class Door:
    """Where others connect. Handshakes run side by side, each with a deadline, and the number of them is
    bounded (greetings.py)."""

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=_MOST_GREETINGS)
        self._listener.settimeout(_LOOK)
        self._secret = secret
        self._closed = False
        self._greetings = Greetings(_MOST_GREETINGS)
        self._refused = ""
        self._came: queue.SimpleQueue[tuple[Hello, Channel]] = queue.SimpleQueue()
        threading.Thread(target=self._stand, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def next(self, seconds: float) -> tuple[Hello, Channel]:
        """The next that has proved to have the secret, and waits to be welcomed; raises TimeoutError."""
        try:
            return self._came.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        self._closed = True

    def _stand(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    end, address = self._listener.accept()
                except TimeoutError:
                    continue
                except (
                    OSError
                ) as error:  # whoever came has gone, or there is no room for more just now
                    log.warning("a connection was not accepted: %s", error)
                    time.sleep(_LOOK)
                    continue
                pending = self._greetings.enter(address[0], functools.partial(_shut, end))
                threading.Thread(target=self._greet, args=(end, pending), daemon=True).start()

    def _greet(self, end: socket.socket, pending: UnprovenCaller) -> None:
        try:
            proved = _proved(end, self._secret, pending)
            self._greetings.leave(pending)  # from here on, no other may close it
            self._came.put(proved)
        except (OSError, Refused) as error:
            reason = error if str(error) and pending.spoke else "it sent nothing"
            text = f"{pending.peer} is no rank of this group: {reason}"
            # A stranger may come again and again.
            log.log(logging.DEBUG if text == self._refused else logging.WARNING, "%s", text)
            self._refused = text
            self._greetings.leave(pending)
            end.close()


def _shut(end: socket.socket) -> None:
    """End what another thread waits for on this connection; that thread closes it."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _proved(end: socket.socket, secret: str, pending: UnprovenCaller) -> tuple[Hello, Channel]:
    channel = Channel(end)
    channel.within(GREETING_SECONDS)
    said, mine = handshake.challenge(_heard(channel))
    pending.spoke = True
    channel.send(handshake.packed(mine))
    channel.proof = handshake.check(secret, said, mine, _heard(channel))
    return said, channel


def welcome(channel: Channel, problem: str | None) -> None:
    """Let in one that has proved itself, or tell it why not and raise that as Refused."""
    channel.within(GREETING_SECONDS)
    channel.send(handshake.packed(Welcome(problem or "", channel.proof)))
    if problem:
        channel.close()
        raise Refused(problem)
    channel.within(None)


def _heard(channel: Channel) -> handshake.Greeting:
    data = channel.receive(MOST_GREETING)
    if data is None:
        raise Refused("it hung up; its secret, or its hostfile, may be another one")
    return handshake.decode(data)
