"""The engine's keeper: starts it, hears it, and when it dies starts it again and resumes.

Requests wait here while no engine is up. A request that was running when the engine died goes on
from prompt and generated tokens. Two deaths make a request a suspect, and suspects run one at a time, so
that the third death tells which of them it was; that one gets an error and the others go on.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from millrace.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    EngineUnavailable,
    MillraceError,
    ModelError,
    from_code,
)
from millrace.protocol import (
    Abort,
    AbortChoice,
    CacheQuery,
    CacheReport,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Step,
    Submit,
)
from millrace.serving.admission import Admission
from millrace.serving.connection import Connection, EngineGone
from millrace.serving.in_flight import InFlight, Outcome
from millrace.serving.metrics import ModelMetrics

log = logging.getLogger("millrace.serving")

DEATHS_PER_REQUEST = 3
STARTS_IN_A_ROW = 5
LONGEST_PAUSE = 10.0
QUERY_PATIENCE = 30.0
"""Seconds that the engine may take to answer a question: it does so between two steps."""
CLOSING_PATIENCE = 15.0
"""Seconds that it may take to end: it writes to disk what is only in memory."""


class State(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineClient:
    def __init__(
        self,
        launch: Callable[[], Awaitable[Connection]],
        admission: Admission,
        metrics: ModelMetrics,
        *,
        idle: float = 5.0,
    ) -> None:
        self._launch = launch
        self._admission = admission
        self._metrics = metrics
        self._idle = idle
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._queries: dict[str, asyncio.Future[CacheReport]] = {}
        self._query_ids = map(str, itertools.count())
        self._numbers = itertools.count(1)
        self.in_flight: dict[int, InFlight] = {}
        self.state = State.STARTING
        self.ready: Ready | None = None
        self.failure: MillraceError | None = None
        self.restarts = 0
        self.stage = "starting"

    @property
    def pid(self) -> int | None:
        return self._connection.pid if self._connection else None

    async def start(self) -> None:
        """Returns once the engine's process is on its way, so that it loads while others work."""
        self._connection = await self._launch()
        self._keeper = asyncio.create_task(self._keep(self._connection))

    async def settled(self) -> None:
        """Wait for the first start to succeed; raises why it did not."""
        await self._settled.wait()
        if self.failure:
            raise self.failure

    async def stop(self, grace: float = CLOSING_PATIENCE) -> None:
        self.state = State.STOPPED
        self._drop_queries()
        self.fail_all(EngineUnavailable("The server is shutting down."))
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._connection:
            await self._connection.close(grace)
            self._connection = None

    def admit(self, answers: int) -> None:
        """Raise why that many more answers cannot be taken: too much load, no engine to be had."""
        if self.state in (State.FAILED, State.STOPPED):
            raise self.failure or EngineUnavailable("The engine has stopped.")
        present = sum(len(r.open) for r in self.in_flight.values())
        self._admission.check(present, answers)

    def submit(
        self, id: str, request: Submit, *, endpoint: str = "", timeout: float | None = None
    ) -> InFlight:
        """Take a request that was admitted, or raise that its id is in use."""
        if any(r.id == id for r in self.in_flight.values()):
            raise BadRequest(f"A request with the id '{id}' is running.", param="id")
        request.id = next(self._numbers)
        active = InFlight(id, request, self._abandon, idle=self._idle, endpoint=endpoint)
        self.in_flight[active.number] = active
        self._metrics.arrived(active)
        if timeout is not None:
            active.timer = asyncio.get_running_loop().call_later(
                timeout, self._expire, active, timeout
            )
        self._hand_over()
        self._count_queue()
        return active

    def finish_choice(self, active: InFlight, choice: int) -> None:
        """The front has all it wants of a choice: free its row."""
        active.open.discard(choice)
        if active.running and self._connection:
            self._connection.send(AbortChoice(active.number, choice))
        self._settle(active)

    def knows(self, id: str) -> bool:
        """Whether a request, or a part of a group, with this id is running."""
        return any(id in (r.id, r.id.partition("#")[0]) for r in self.in_flight.values())

    def cancel(self, id: str) -> bool:
        """End a request, or all parts of a group, with an error event; False if there is none."""
        found = [r for r in self.in_flight.values() if id in (r.id, r.id.partition("#")[0])]
        for active in found:
            self._end(active, "cancelled", Cancelled("The request was cancelled."))
        return bool(found)

    async def cache(self, *, clear: bool = False) -> CacheReport:
        """What the engine's prefix cache holds, after dropping it all if `clear` says so."""
        if self.state is not State.READY or self._connection is None:
            raise self.failure or EngineUnavailable(
                f"The engine is {self.state.value}; ask again when it is ready."
            )
        id = next(self._query_ids)
        answer: asyncio.Future[CacheReport] = asyncio.get_running_loop().create_future()
        self._queries[id] = answer
        self._connection.send(CacheQuery(id, clear))
        try:
            async with asyncio.timeout(QUERY_PATIENCE):
                return await answer
        except TimeoutError:
            raise EngineUnavailable("The engine is too busy to answer; ask again later.") from None
        finally:
            del self._queries[id]

    def fail_all(self, error: MillraceError) -> None:
        for active in list(self.in_flight.values()):
            self._end(active, "error", error)

    def _drop_queries(self) -> None:
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("The engine ended before it answered."))

    def _expire(self, active: InFlight, timeout: float) -> None:
        if self.in_flight.get(active.number) is active:
            text = f"The request was not finished within its timeout of {timeout:g} seconds."
            self._end(active, "timeout", DeadlineExceeded(text))

    def _abandon(self, active: InFlight) -> None:
        if self.in_flight.get(active.number) is active:
            self._end(active, "disconnected", None)

    def _end(self, active: InFlight, outcome: Outcome, error: MillraceError | None) -> None:
        """Let go of a request: here, in the engine, and in the books."""
        del self.in_flight[active.number]
        active.outcome = outcome
        if error is not None:
            active.fail(error)
        if outcome not in ("ok", "error") and active.running and self._connection:
            self._connection.send(Abort(active.number))
        active.open.clear()
        if active.timer is not None:
            active.timer.cancel()
        seconds = time.monotonic() - active.arrived
        self._admission.saw(seconds)
        self._metrics.ended(active, seconds)
        self._count_queue()
        log.info("request ended", extra={"fields": _summary(active, seconds)})
        self._hand_over()

    def _count_queue(self) -> None:
        self._metrics.queue(sum(r.first_token is None for r in self.in_flight.values()))
        if not self.in_flight:
            self._metrics.idle()

    def _hand_over(self) -> None:
        """Give the engine all requests it may have now."""
        if self.state is not State.READY or self._connection is None:
            return
        suspect_runs = any(r.running and _suspect(r) for r in self.in_flight.values())
        for active in self.in_flight.values():
            if active.running or (_suspect(active) and suspect_runs):
                continue
            suspect_runs |= _suspect(active)
            active.running = True
            self._connection.send(active.remainder())

    def _settle(self, active: InFlight) -> None:
        if not active.open and self.in_flight.get(active.number) is active:
            self._end(active, "ok", None)

    async def _keep(self, connection: Connection) -> None:
        failed_starts = 0
        pause = 0.0
        while True:
            try:
                while True:
                    self._dispatch(await connection.receive())
            except EngineGone as gone:
                was_ready = self.state is State.READY
                await connection.close(0)
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
            connection = self._connection = await self._launch()

    def _give_up(self, failure: MillraceError) -> None:
        self.state = State.FAILED
        self._drop_queries()
        self.fail_all(failure)
        self._settled.set()

    def _bury(self, gone: EngineGone) -> None:
        """An engine has died: say so, and decide who goes on."""
        self.state = State.RESTARTING
        self._drop_queries()
        self.restarts += 1
        self._metrics.restarted()
        log.error(
            "the engine is gone (%s); starting it again, %d requests go on",
            gone,
            len(self.in_flight),
        )
        for active in list(self.in_flight.values()):
            if not active.running:
                continue
            active.running = False
            active.deaths += 1
            if active.deaths >= DEATHS_PER_REQUEST:
                text = (
                    f"The engine died {active.deaths} times while it ran this request; "
                    f"the last time, {gone}."
                )
                self._end(active, "error", EngineUnavailable(text))

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Step():
                self._stepped(message)
            case Ready():
                self.ready = message
                self.state = State.READY
                self._settled.set()
                self._hand_over()
            case Loading(stage=stage):
                self.stage = stage
            case CacheReport(id=id):
                self._metrics.cache(message.memory.bytes, message.disk.bytes if message.disk else 0)
                if (answer := self._queries.get(id)) and not answer.done():
                    answer.set_result(message)
            case Failed(code=code, message=text, id=None):
                self.failure = ModelError(text) if code == "model_error" else from_code(code, text)
            case Failed(code=code, message=text, id=int(id)):
                if active := self.in_flight.get(id):
                    self._end(active, "error", from_code(code, text))

    def _stepped(self, step: Step) -> None:
        self._metrics.stepped(step)
        for done in step.prefilled:
            if active := self.in_flight.get(done.id):
                self._metrics.prefilled(active.progress(done))
        for scores in step.prompt_logprobs:
            if active := self.in_flight.get(scores.id):
                active.scores(scores)
        for row in step.rows:
            if active := self.in_flight.get(row.id):
                first, before = active.first_token is None, active.last_token
                active.take(row)
                if first:
                    self._metrics.first_token(active)
                    self._count_queue()
                self._metrics.token(None if first else active.last_token - before, len(row.tokens))
                self._settle(active)
        if not self.in_flight:
            # The step was on its way when the last request left: it is not the last word.
            self._metrics.idle()


def _summary(active: InFlight, seconds: float) -> dict[str, Any]:
    first = active.first_token
    return {
        "id": active.id,
        "endpoint": active.endpoint,
        "outcome": active.outcome,
        "prompt_tokens": len(active.submit.prompt),
        "cached_tokens": active.cached,
        "cache_hit": active.hit,
        "generated_tokens": active.tokens_generated,
        "ttft": round(first - active.arrived, 3) if first else None,
        "seconds": round(seconds, 3),
        "deaths": active.deaths,
    }


def _suspect(active: InFlight) -> bool:
    return active.deaths >= DEATHS_PER_REQUEST - 1
