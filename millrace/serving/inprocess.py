"""An engine in a thread of this process, for the Python API: the same engine, without sockets."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from millrace.config import EngineConfig
from millrace.engine.transport import ThreadTransport
from millrace.errors import MillraceError
from millrace.flight import FlightReading
from millrace.protocol import Failed, FromEngine, Shutdown, ToEngine, to_engine
from millrace.serving.connection import EngineGone
from millrace.serving.suspicion import Cause

_LOOK_SECONDS = 0.005


class ThreadConnection:
    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[FromEngine | EngineGone] = asyncio.Queue()
        self._transport = ThreadTransport(self._deliver)
        self._thread = threading.Thread(
            target=self._run, args=(config,), name="millrace-engine", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return None

    def send(self, message: ToEngine) -> None:
        self._transport.put(message)

    def send_encoded(self, message: memoryview) -> None:
        self._transport.put(to_engine.decode(message))

    async def receive(self) -> FromEngine:
        item = await self._inbox.get()
        if isinstance(item, EngineGone):
            raise item
        return item

    def reading(self) -> FlightReading | None:
        return None

    def kill(self, why: str, cause: Cause) -> None:
        """A thread cannot be ended from outside; nobody watches it, so nobody asks."""

    async def close(self, grace: float) -> None:
        """Wait for it however long it takes, since a thread cannot be ended by force."""
        self.send(Shutdown())
        while _runs(self._thread):
            await asyncio.sleep(_LOOK_SECONDS)

    def _deliver(self, message: FromEngine | EngineGone) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    def _run(self, config: EngineConfig) -> None:
        from millrace.engine.build import build

        try:
            build(config, self._transport).run()
            self._deliver(EngineGone("it was told to stop"))
        except MillraceError as error:
            self._deliver(Failed(error.code, error.message))
            self._deliver(EngineGone(error.message))
        except Exception as error:  # the thread is the engine: whatever ends it, the client hears
            self._deliver(EngineGone(repr(error)))


def _runs(thread: threading.Thread) -> bool:
    """Whether it is there for the system, too, which says so on Linux.

    Python (up to 3.12) calls a thread ended before libraries have tidied up after it. MLX takes the
    interpreter's lock for that, and an interpreter that ends meanwhile takes the process down.
    """
    return thread.is_alive() or Path(f"/proc/self/task/{thread.native_id}").exists()
