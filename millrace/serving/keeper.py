"""Keeps an engine up: starts it, watches it, and starts it again as long as the server lives.

It knows how an engine starts and ends, and passes on what the engine says; it knows nothing of
requests. It gives up where another attempt would end as the last one did: files that are broken or
missing, a model that engines refuse again and again. Whoever holds the engine then reports why, and may
begin anew later.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from millrace import descriptors
from millrace.errors import BrokenFiles, EngineUnavailable, MillraceError, ModelError, from_code
from millrace.flight import FlightReading
from millrace.protocol import Failed, FromEngine, Loading, Ready, ToEngine
from millrace.serving.connection import Connection, EngineGone, Garbled
from millrace.serving.suspicion import Cause
from millrace.serving.watch import Pulse, Watch, processor_time, until_ill

log = logging.getLogger("millrace.serving")

FIRST_STARTS = 5
"""How often an engine that says nothing of why it cannot start is started at first."""
RESTARTS = 8
"""The same for one that takes the place of an engine that was ready: about half a minute."""
REFUSALS = 3
"""How often an engine that takes another's place may say that it cannot load the model."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 10.0


class State(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    """Up, and not heard of for some seconds."""
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Tenant(Protocol):
    """Whose engine it is."""

    def engine_ready(self) -> None: ...

    def engine_said(self, message: FromEngine) -> None: ...

    def engine_garbled(self, requests: Sequence[int]) -> None:
        """Something about these requests could not be understood."""

    def engine_gone(self, gone: EngineGone, working: Sequence[int]) -> None:
        """It ended while it was working on these requests; another is being started."""

    def engine_failed(self, failure: MillraceError) -> None:
        """There will be none."""


class Keeper:
    def __init__(
        self,
        launch: Callable[[], Awaitable[Connection]],
        tenant: Tenant,
        diagnose: Callable[[], str | None] = lambda: None,
        *,
        restarts: int | None = RESTARTS,
    ) -> None:
        """`diagnose` tells what is wrong with the model's files, if anything is; it reads the disk.
        `restarts` is how many engines may end before one is ready, None for any number."""
        self._launch = launch
        self._tenant = tenant
        self._diagnose = diagnose
        self._most_deaths = restarts
        self._deaths = self._refusals = 0
        """Engines that ended, and that could not load the model, since one was last ready."""
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._starts = 0
        """Attempts since an engine was last ready."""
        self.state = State.STARTING
        self.reason = ""
        """Why the engine is not ready, after it was."""
        self._said: str | None = None
        """Why it could not start, in its own words."""
        self.stage = "starting"
        self.ready: Ready | None = None
        self.ready_since: float | None = None
        self.failure: MillraceError | None = None
        """Why there is no engine, and will be none."""
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._connection.pid if self._connection else None

    @property
    def why(self) -> str | None:
        """Why requests are not being served; None if they are."""
        if self.state is State.READY:
            return None
        if self.failure is not None:
            return self.failure.message
        if self.state is State.STARTING:
            return f"The engine is starting: {self.stage}."
        return self.reason if self.state is not State.STOPPED else "The engine has stopped."

    async def start(self) -> None:
        """Returns once the engine's process is on its way, so that it loads while others work."""
        self._starts = 1
        self.stage = "starting"
        self._connection = await self._launch()
        self._task = asyncio.create_task(self._keep())

    async def settled(self) -> None:
        """Wait for the first start to succeed; raises why it did not."""
        await self._settled.wait()
        if self.failure:
            raise self.failure
        if self.ready is None:
            raise EngineUnavailable("The engine has stopped.")

    def give_up(self, failure: MillraceError) -> None:
        """There will be no engine, though none may have been started: whoever waits hears why."""
        self.failure = self.failure or failure
        self._settled.set()

    async def stop(self, grace: float) -> None:
        self.state = State.STOPPED
        self._settled.set()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if connection := self._connection:
            await connection.close(grace)
            self._connection = None

    def send(self, message: ToEngine) -> None:
        """Raises what keeps a message from being sent; one to an engine that is gone is lost."""
        if self._connection:
            self._connection.send(message)

    def send_encoded(self, message: memoryview) -> None:
        """The same for one that comes as it is sent: it may be too large to be looked at here."""
        if self._connection:
            self._connection.send_encoded(message)

    async def _keep(self) -> None:
        while self.failure is None:
            try:
                await self._live()
            except Exception as error:  # a fault in here is not the engine's, and must not end this
                log.exception("the engine's keeper failed; it goes on")
                self._lost(f"The engine's keeper failed: {error!r}.")
                try:
                    await self._bury(EngineGone(f"its keeper failed: {error!r}", Cause.OUTSIDE))
                except Exception:
                    log.exception("the engine's keeper failed again; it goes on")
                await asyncio.sleep(SHORTEST_PAUSE)
        self.state = State.FAILED
        self._tenant.engine_failed(self.failure)
        self._settled.set()

    async def _live(self) -> None:
        """One engine, from its start to its end."""
        if self._connection is None:
            await asyncio.sleep(self._pause())
            if (problem := await asyncio.to_thread(self._diagnose)) is not None:
                self.failure = BrokenFiles(problem)
                return
            self._starts += 1
            try:
                self._connection = await self._launch()
            except Exception as error:  # whatever is missing may be back at the next attempt
                log.error("the engine cannot be started (%r), attempt %d", error, self._starts)
                why = descriptors.explain(error).removesuffix(".")
                self._lost(f"The engine cannot be started: {why}; it is being tried again.")
                return
        connection = self._connection
        watching = asyncio.create_task(self._watch(connection))
        try:
            while True:
                await self._hear(connection)
        except EngineGone as gone:
            self._give_up_on(gone)
            self._lost(self._said or f"The engine is gone ({gone}); it is being started again.")
            self._said = None
            await self._bury(gone)
        finally:
            watching.cancel()

    def _give_up_on(self, gone: EngineGone) -> None:
        """Note the end of an engine; the last of too many is the reason why there will be no other."""
        if self._starts == 0 or self.failure is not None:
            return  # this one was ready
        self._deaths += 1
        most = FIRST_STARTS if self.ready is None else self._most_deaths
        if most is not None and self._deaths >= most:
            how = str(self._said or gone).removesuffix(".")
            self.failure = EngineUnavailable(f"The engine did not start in {most} attempts: {how}.")

    async def _hear(self, connection: Connection) -> None:
        try:
            message = await connection.receive()
        except Garbled as garbled:
            log.error("%s", garbled)
            self._tenant.engine_garbled(garbled.requests)
            message = garbled.step
        try:
            self._understand(message)
        except Exception:  # one message must not end the service
            log.exception("a message of the engine could not be handled")

    def _understand(self, message: FromEngine) -> None:
        match message:
            case Ready():
                self.ready = message
                self.ready_since = self.ready_since or time.monotonic()
                self.state = State.READY
                self._starts = self._deaths = self._refusals = 0
                self._settled.set()
                self._tenant.engine_ready()
            case Loading(stage=stage, done=done):
                self.stage = stage if done is None else f"{stage}, {done:.0%}"
            case Failed(code=code, message=text, id=None) if self.ready is None:
                self.failure = ModelError(text) if code == "model_error" else from_code(code, text)
            case Failed(code=code, message=text, id=None):
                log.error("the engine cannot start: %s", text)
                self._said = f"The engine cannot be started: {text}"
                self._refusals += code == ModelError.code
                if self._refusals >= REFUSALS:
                    self.failure = ModelError(text)
            case _:
                self._tenant.engine_said(message)

    def _lost(self, reason: str) -> None:
        if self.ready is not None:
            self.state = State.RESTARTING
            self.reason = reason

    async def _bury(self, gone: EngineGone) -> None:
        connection, self._connection = self._connection, None
        reading = None
        if connection is not None:
            with contextlib.suppress(ValueError):  # of a recorder that is closed
                reading = connection.reading()
            try:
                await connection.close(0)
            except asyncio.CancelledError:
                self._connection = connection  # for `stop`, which has come in between
                raise
        if self.failure is None:
            self.restarts += 1
            self._tenant.engine_gone(gone, reading.requests if reading else ())

    def _pause(self) -> float:
        """None after an engine that was ready; longer and longer after those that never were."""
        if not self._starts:
            return 0.0
        return min(LONGEST_PAUSE, SHORTEST_PAUSE * (1 << min(self._starts - 1, 10)))

    async def _watch(self, connection: Connection) -> None:
        if connection.reading() is None or (pid := connection.pid) is None:
            return

        def read() -> FlightReading:
            return connection.reading() or FlightReading()

        pulse = await until_ill(read, Watch(lambda: processor_time(pid)), self._notice)
        if pulse is Pulse.FROZEN:
            connection.kill("it was frozen and has been ended", Cause.OUTSIDE)
        else:
            connection.kill("its work did not go on and it has been ended", Cause.CRASH)

    def _notice(self, pulse: Pulse) -> None:
        if pulse is Pulse.QUIET and self.state is State.READY:
            log.warning("the engine has not been heard of for some seconds")
            self.reason = "The engine has not been heard of for some seconds."
            self.state = State.STALLED
        elif pulse is Pulse.WELL and self.state is State.STALLED:
            self.state = State.READY
            self._tenant.engine_ready()
