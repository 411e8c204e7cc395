"""A running engine as the front sees it: something to send to, to hear from, and that may be gone."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from millrace.config import EngineConfig
from millrace.protocol import FromEngine, Shutdown, ToEngine, encoder, from_engine


class EngineGone(Exception):
    """The engine has ended; `str` says how."""


class Connection(Protocol):
    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineGone once the engine has ended and nothing is left."""

    async def close(self, grace: float) -> None:
        """End the engine, by force after `grace` seconds, and leave nothing behind."""

    @property
    def pid(self) -> int | None: ...


class ProcessConnection:
    """An engine in a process of its own, over an ipc socket in a private folder."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, file: Path
    ) -> None:
        self._process = process
        self._socket = socket
        self._file = file
        self._ended = asyncio.ensure_future(process.wait())
        self._hearing: asyncio.Future[bytes] | None = None

    @classmethod
    async def launch(cls, config: EngineConfig, file: Path) -> ProcessConnection:
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{file}"
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "millrace.engine",
            address,
            msgspec.json.encode(config).decode(),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        return cls(process, socket, file)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        # Never blocks: the queue has no limit, and a dead peer's queue goes with the socket.
        self._socket.send(encoder.encode(message))

    async def receive(self) -> FromEngine:
        if self._hearing is None:
            self._hearing = asyncio.ensure_future(self._socket.recv())
        if not self._hearing.done():
            first: set[asyncio.Future[Any]] = {self._hearing, self._ended}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not self._hearing.done():
            # Ended: what it said last may still be on its way through the socket.
            await asyncio.wait({self._hearing}, timeout=0.2)
        if self._hearing.done():
            data, self._hearing = self._hearing.result(), None
            message: FromEngine = from_engine.decode(data)
            return message
        raise EngineGone(_how(self._process.returncode))

    async def close(self, grace: float) -> None:
        if self._process.returncode is None:
            self.send(Shutdown())
            await asyncio.wait({self._ended}, timeout=grace)
        if self._process.returncode is None:
            self._process.kill()
            await self._ended
        if self._hearing is not None:
            self._hearing.cancel()
        self._socket.close()
        self._file.unlink(missing_ok=True)


def _how(code: int | None) -> str:
    if code is None:
        return "it closed its connection"
    if code < 0:
        return f"it was killed by signal {-code}"
    return f"it ended with status {code}"
