"""A running engine as the front sees it: something to send to, to hear from, and that may be gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from millrace.config import EngineConfig
from millrace.flight import FlightReading, Recording
from millrace.protocol import (
    Encoded,
    FromEngine,
    Prefilled,
    PromptLogprobs,
    RowTokens,
    Shutdown,
    Step,
    ToEngine,
    encoder,
    from_engine,
)
from millrace.protocol.specprefill import Scoring, Selected
from millrace.serving.suspicion import Cause

_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EngineGone(Exception):
    """The engine has ended; `str` says how."""

    def __init__(self, how: str, cause: Cause = Cause.CRASH) -> None:
        super().__init__(how)
        self.cause = cause


class Garbled(Exception):
    """A message that is not as agreed: what of it is, and the requests that the rest was about."""

    def __init__(self, step: Step, requests: list[int]) -> None:
        super().__init__(f"a message of the engine about the requests {requests} is garbled")
        self.step = step
        self.requests = requests


class Connection(Protocol):
    def send(self, message: ToEngine) -> None: ...

    def send_encoded(self, message: memoryview) -> None: ...

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineGone once the engine has ended and nothing is left."""

    def reading(self) -> FlightReading | None:
        """What the engine's recorder holds, also after its end; None if it has none."""

    def kill(self, why: str, cause: Cause) -> None:
        """End the engine at once, for a reason that is told instead of how it ended."""

    async def close(self, grace: float) -> None:
        """End the engine, by force after `grace` seconds, and leave nothing behind."""

    @property
    def pid(self) -> int | None: ...


class ProcessConnection:
    """An engine in a process of its own, over an ipc socket in a private folder."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        file: Path,
        recording: Recording,
    ) -> None:
        self._process = process
        self._socket = socket
        self._file = file
        self._recording = recording
        self._ended = asyncio.ensure_future(process.wait())
        self._hearing: asyncio.Future[bytes] | None = None
        self._killed: EngineGone | None = None

    @classmethod
    async def launch(
        cls, config: EngineConfig, file: Path, environment: Mapping[str, str] = os.environ
    ) -> ProcessConnection:
        recording = Recording()
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
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
                str(recording.file),
                stdin=asyncio.subprocess.PIPE,
                env={**environment, "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=(recording.file,),
            )
        except BaseException:
            socket.close()
            recording.close()
            raise
        return cls(process, socket, file, recording)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        # Never blocks: the queue has no limit, and a dead peer's queue goes with the socket.
        self._socket.send(encoder.encode(message))

    def send_encoded(self, message: memoryview) -> None:
        self._socket.send(message, copy=False)

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
            return decoded(data)
        raise self._killed or gone(self._process.returncode)

    def reading(self) -> FlightReading | None:
        return self._recording.read()

    def kill(self, why: str, cause: Cause) -> None:
        if self._process.returncode is None:
            self._killed = EngineGone(why, cause)
            self._process.kill()

    async def close(self, grace: float) -> None:
        if self._process.returncode is None and grace:
            self.send(Shutdown())
            await asyncio.wait({self._ended}, timeout=grace)
        if self._process.returncode is None:
            self._process.kill()
            # Whoever waits may be cancelled, and another come who waits for the same.
            await asyncio.wait({self._ended})
        if self._hearing is not None:
            self._hearing.cancel()
        self._socket.close()
        self._recording.close()
        self._file.unlink(missing_ok=True)


def decoded(data: bytes) -> FromEngine:
    """A message; raises Garbled where only a part of it is as agreed, EngineGone where none is."""
    try:
        message: FromEngine = from_engine.decode(data)
        return message
    except msgspec.DecodeError as error:
        try:
            raw = msgspec.msgpack.decode(data)
            step, bad = Step(), list[int]()
            for kind, parts, good in (
                (RowTokens, raw.get("rows", ()), step.rows),
                (Prefilled, raw.get("prefilled", ()), step.prefilled),
                (PromptLogprobs, raw.get("prompt_logprobs", ()), step.prompt_logprobs),
                (Encoded, raw.get("encoded", ()), step.encoded),
                (Scoring, raw.get("scoring", ()), step.scoring),
                (Selected, raw.get("selected", ()), step.selected),
            ):
                _sort(kind, parts, good, bad)
        except Exception:
            raise EngineGone(f"it sent what is no message ({error})", Cause.OUTSIDE) from None
        raise Garbled(step, bad) from error


def _sort(kind: type[Any], parts: Any, good: list[Any], bad: list[int]) -> None:
    for part in parts:
        try:
            good.append(msgspec.convert(part, kind))
        except msgspec.ValidationError:
            bad.append(int(part[0]))


def gone(code: int | None) -> EngineGone:
    if code is None:
        return EngineGone("it closed its connection")
    if code < 0:
        cause = Cause.KILL if -code in _SENT_BY_OTHERS else Cause.CRASH
        return EngineGone(f"it was killed by signal {-code}", cause)
    return EngineGone(f"it ended with status {code}")
