"""How an engine hears and answers: over a ZeroMQ socket in its own process, or in a thread."""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from millrace.errors import EngineUnavailable
from millrace.protocol import Failed, FromEngine, Loading, Shutdown, ToEngine, encoder, to_engine

log = logging.getLogger("millrace.engine")


class Transport(Protocol):
    def receive(self, wait: float | None) -> list[ToEngine]:
        """All messages that are there, after waiting for the first; None waits as long as it takes."""

    def send(self, message: FromEngine) -> None: ...


class SocketTransport:
    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def receive(self, wait: float | None) -> list[ToEngine]:
        raw: list[bytes] = []
        if wait is None:
            raw.append(self._socket.recv())
        elif wait and not self._socket.poll(math.ceil(wait * 1000)):
            return []
        while True:
            try:
                raw.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return [m for data in raw if (m := self._decoded(data)) is not None]

    def _decoded(self, data: bytes) -> ToEngine | None:
        """A message; one that is not as agreed is answered, and costs its own request only."""
        try:
            message: ToEngine = to_engine.decode(data)
            return message
        except msgspec.DecodeError as error:
            log.exception("a message of the front is garbled")
            fields = msgspec.msgpack.decode(data)
            if isinstance(fields, dict) and isinstance(fields.get("id"), int):
                text = f"The engine does not understand the request: {error}"
                self.send(Failed("request_failed", text, fields["id"]))
            return None

    def send(self, message: FromEngine) -> None:
        self._socket.send(encoder.encode(message))

    def close(self) -> None:
        self._socket.close()
        zmq.Context.instance().term()


class ThreadTransport:
    """For an engine that runs in a thread of the caller's own process."""

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._deliver = deliver
        self._stopping = False

    def put(self, message: ToEngine) -> None:
        self._stopping = self._stopping or isinstance(message, Shutdown)
        self._inbox.put(message)

    def receive(self, wait: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if wait != 0:
            try:
                messages.append(self._inbox.get(timeout=wait))
            except queue.Empty:
                return []
        while True:
            try:
                messages.append(self._inbox.get_nowait())
            except queue.Empty:
                return messages

    def send(self, message: FromEngine) -> None:
        """Raises, out of what would take long, that nobody waits for it any more."""
        if self._stopping and isinstance(message, Loading):
            raise EngineUnavailable("The engine was told to stop while it loaded.")
        self._deliver(message)
