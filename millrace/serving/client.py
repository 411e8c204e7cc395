"""The engine's keeper: starts it, hears it, and when it dies starts it again and resumes.

Requests wait here while no engine is up. A request that was running when the engine died goes on
from prompt and made tokens. Two deaths make a request a suspect, and suspects run one at a time, so
that the third death tells which of them it was; that one gets an error and the others go on.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable

from millrace.errors import EngineUnavailable, MillraceError, ModelError, from_code
from millrace.protocol import (
    Abort,
    AbortChoice,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Step,
    Submit,
)
from millrace.serving.connection import Connection, EngineGone
from millrace.serving.live import Live

log = logging.getLogger("millrace.serving")

DEATHS_PER_REQUEST = 3
STARTS_IN_A_ROW = 5
LONGEST_PAUSE = 10.0


class State(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineClient:
    def __init__(self, launch: Callable[[], Awaitable[Connection]], *, idle: float = 5.0) -> None:
        self._launch = launch
        self._idle = idle
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self.live: dict[str, Live] = {}
        self.state = State.STARTING
        self.ready: Ready | None = None
        self.failure: MillraceError | None = None
        self.restarts = 0
        self.stage = "starting"

    @property
    def pid(self) -> int | None:
        return self._connection.pid if self._connection else None

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep())

    async def settled(self) -> None:
        """Wait for the first start to succeed; raises why it did not."""
        await self._settled.wait()
        if self.failure:
            raise self.failure

    async def stop(self, grace: float = 5.0) -> None:
        self.state = State.STOPPED
        self.fail_all(EngineUnavailable("The server is shutting down."))
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._connection:
            await self._connection.close(grace)
            self._connection = None

    def submit(self, request: Submit) -> Live:
        if self.state in (State.FAILED, State.STOPPED):
            raise self.failure or EngineUnavailable("The engine has stopped.")
        live = Live(request, self._abandon, self._idle)
        self.live[live.id] = live
        self._hand_over()
        return live

    def finish_choice(self, live: Live, choice: int) -> None:
        """The front has all it wants of a choice: free its row."""
        live.close_choice(choice)
        if live.running and self._connection:
            self._connection.send(AbortChoice(live.id, choice))
        self._settle(live)

    def fail_all(self, error: MillraceError) -> None:
        for live in list(self.live.values()):
            live.fail(error)
        self.live.clear()

    def _abandon(self, live: Live) -> None:
        if self.live.get(live.id) is not live:
            return
        del self.live[live.id]
        live.open.clear()
        if live.running and self._connection and self.state is State.READY:
            self._connection.send(Abort(live.id))
        self._hand_over()

    def _hand_over(self) -> None:
        """Give the engine all requests it may have now."""
        if self.state is not State.READY or self._connection is None:
            return
        suspect_runs = any(r.running and _suspect(r) for r in self.live.values())
        for live in self.live.values():
            if live.running or (_suspect(live) and suspect_runs):
                continue
            suspect_runs |= _suspect(live)
            live.running = True
            self._connection.send(live.remainder())

    def _settle(self, live: Live) -> None:
        if not live.open and self.live.get(live.id) is live:
            del self.live[live.id]
            if _suspect(live):
                self._hand_over()

    async def _keep(self) -> None:
        failed_starts = 0
        pause = 0.0
        while True:
            self._connection = await self._launch()
            try:
                while True:
                    self._dispatch(await self._connection.receive())
            except EngineGone as gone:
                was_ready = self.state is State.READY
                await self._connection.close(0)
                self._connection = None
                failed_starts = 0 if was_ready else failed_starts + 1
                if self.failure is None and failed_starts >= STARTS_IN_A_ROW:
                    self.failure = EngineUnavailable(
                        f"The engine did not start in {STARTS_IN_A_ROW} attempts: {gone}."
                    )
                if self.failure:
                    self._give_up(self.failure)
                    return
                self._bury(gone)
            pause = 0.0 if was_ready else min(LONGEST_PAUSE, max(0.5, pause * 2))
            await asyncio.sleep(pause)

    def _give_up(self, failure: MillraceError) -> None:
        self.state = State.FAILED
        self.fail_all(failure)
        self._settled.set()

    def _bury(self, gone: EngineGone) -> None:
        """An engine has died: say so, and decide who goes on."""
        self.state = State.RESTARTING
        self.restarts += 1
        log.error(
            "the engine is gone (%s); starting it again, %d requests go on", gone, len(self.live)
        )
        for live in list(self.live.values()):
            if not live.running:
                continue
            live.running = False
            live.deaths += 1
            live.resumes += 1
            if live.deaths >= DEATHS_PER_REQUEST:
                del self.live[live.id]
                live.fail(
                    EngineUnavailable(
                        f"The engine died {live.deaths} times while it ran this request; "
                        f"the last time, {gone}."
                    )
                )

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Step(rows=rows, prefilled=prefilled):
                for done in prefilled:
                    if live := self.live.get(done.id):
                        live.progress(done)
                for row in rows:
                    if live := self.live.get(row.id):
                        live.take(row)
                        self._settle(live)
            case Ready():
                self.ready = message
                self.state = State.READY
                self._settled.set()
                self._hand_over()
            case Loading(stage=stage):
                self.stage = stage
            case Failed(code=code, message=text, id=None):
                self.failure = ModelError(text) if code == "model_error" else from_code(code, text)
            case Failed(code=code, message=text, id=str(id)):
                if live := self.live.pop(id, None):
                    live.fail(from_code(code, text))


def _suspect(live: Live) -> bool:
    return live.deaths >= DEATHS_PER_REQUEST - 1
