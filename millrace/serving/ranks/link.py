"""A connection between a server and a worker: `distributed.channel` for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from millrace.distributed import handshake
from millrace.distributed.channel import GREETING_SECONDS
from millrace.distributed.greetings import UnprovenCaller
from millrace.distributed.handshake import (
    LENGTH,
    MOST_BYTES,
    MOST_GREETING,
    Hello,
    Refused,
    Welcome,
)


class Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        end = writer.get_extra_info("socket")
        if end is not None:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """What cannot be sent is lost: whoever does not answer is believed to be gone anyway."""
        if not self._writer.is_closing():
            self._writer.write(handshake.framed(data))

    async def drained(self) -> None:
        await self._writer.drain()

    async def receive(self, most: int = MOST_BYTES) -> bytes | None:
        """The next message; None when the other side has closed."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > most:
                raise Refused(f"a message of {length} bytes is announced")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.transport.abort()


async def connect(address: tuple[str, int], secret: str, role: str, rank: int) -> Link:
    """Raises OSError (TimeoutError is one) where nobody answers, Refused where somebody else does."""
    async with asyncio.timeout(GREETING_SECONDS):
        link = Link(*await asyncio.open_connection(*address))
        try:
            said = handshake.hello(role, rank)
            link.send(handshake.packed(said))
            theirs, proof = handshake.prove(secret, said, await _heard(link))
            link.send(handshake.packed(proof))
            handshake.confirm(secret, said, theirs, await _heard(link))
        except BaseException:
            link.close()
            raise
    return link


async def accept(
    link: Link,
    secret: str,
    pending: UnprovenCaller,
    problem_of: Callable[[Hello], Awaitable[str | None]],
) -> Hello:
    """Refused unless the caller has the secret, and `problem_of` finds nothing against it."""
    async with asyncio.timeout(GREETING_SECONDS):
        said, mine = handshake.challenge(await _heard(link))
        pending.spoke = True
        link.send(handshake.packed(mine))
        proof = handshake.check(secret, said, mine, await _heard(link))
        problem = await problem_of(said)
        link.send(handshake.packed(Welcome(problem or "", proof)))
        if problem:
            await link.drained()
            raise Refused(problem)
    return said


async def _heard(link: Link) -> handshake.Greeting:
    data = await link.receive(MOST_GREETING)
    if data is None:
        raise Refused("it hung up; its secret, or its hostfile, may be another one")
    return handshake.decode(data)
