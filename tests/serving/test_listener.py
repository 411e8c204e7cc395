"""The listening socket: small writes leave at once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from millrace.errors import SetupError
from millrace.serving.listener import bind


def test_small_writes_are_not_held_back() -> None:
    options: list[int] = []

    async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken: socket.socket = writer.get_extra_info("socket")
        options.append(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect() -> None:
        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(connect())
    assert options and all(options)


def test_a_port_in_use_is_told() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(SetupError, match="--port"):
            bind("127.0.0.1", taken.getsockname()[1])
