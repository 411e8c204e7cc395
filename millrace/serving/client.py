"""The front's side of one engine: the requests it has, and how they get through its deaths.

Requests wait here while no engine is up. A request that was running when the engine died goes on
from prompt and generated tokens, unless it is what the engine dies of (millrace.serving.suspicion).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from millrace.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    EngineUnavailable,
    MillraceError,
    RequestFailed,
    from_code,
)
from millrace.protocol import (
    Abort,
    AbortChoice,
    AdapterAnswer,
    DeviceMemory,
    Encode,
    Encoded,
    Failed,
    FromEngine,
    PicturesWanted,
    Prefilled,
    PromptLogprobs,
    Ready,
    RowTokens,
    Step,
    StepPart,
    Submit,
    encoder,
)
from millrace.protocol.prefixes import CacheChanged, CacheReport
from millrace.protocol.specprefill import Scoring, Selected
from millrace.serving.adapters import AdapterDesk, AdapterList
from millrace.serving.admission import Admission
from millrace.serving.connection import Connection, EngineGone
from millrace.serving.encoding import EncodingInFlight
from millrace.serving.engine_request import EngineRequest, Outcome
from millrace.serving.in_flight import InFlight
from millrace.serving.keeper import RESTARTS, Keeper, State
from millrace.serving.metrics import ModelMetrics
from millrace.serving.picture_supply import PictureSupply
from millrace.serving.queries import CacheQueries, not_ready, patiently
from millrace.serving.ranks.group import RankGroup
from millrace.serving.request_table import RequestTable
from millrace.serving.slices import in_slices
from millrace.serving.suspicion import Suspicion

log = logging.getLogger("millrace.serving")

CLOSING_PATIENCE = 15.0
"""Seconds that it may take to end: it writes to disk what is only in memory."""


class EngineClient:
    def __init__(
        self,
        launch: Callable[[], Awaitable[Connection]],
        admission: Admission,
        metrics: ModelMetrics,
        *,
        idle: float = 5.0,
        adapters: AdapterList | None = None,
        diagnose: Callable[[], str | None] = lambda: None,
        restarts: int | None = RESTARTS,
    ) -> None:
        """`diagnose` tells what is wrong with the model's files; `restarts` is the keeper's."""
        self._keeper = Keeper(launch, self, diagnose, restarts=restarts)
        self.adapters = AdapterDesk(
            adapters or AdapterList(),
            self._keeper.send,
            lambda: (r.adapter for r in self.in_flight.values()),
        )
        self._suspicion = Suspicion()
        self.admission = admission
        self.metrics = metrics
        self._idle = idle
        self._weighed: tuple[Ready | None, DeviceMemory | None] = (None, None)
        """An engine, and its device's memory when it last told."""
        self.queries = CacheQueries(self._keeper.send)
        self._supply = PictureSupply(self._keeper.send_encoded, lambda: self.ready, self._failed)
        self._numbers = itertools.count(1)
        self.in_flight = RequestTable()
        self.group: RankGroup | None = None
        self.when_idle: Callable[[], None] = lambda: None
        """Called when the last request has left."""
        self.when_failed: Callable[[MillraceError], None] = lambda error: None
        """Called when there will be no further engine."""

    @property
    def state(self) -> State:
        return self._keeper.state

    @property
    def why(self) -> str | None:
        """Why requests are not being served; None if they are."""
        return self._keeper.why

    @property
    def stage(self) -> str:
        return self._keeper.stage

    @property
    def ready(self) -> Ready | None:
        return self._keeper.ready

    @property
    def memory(self) -> DeviceMemory | None:
        """What the engine's device holds, as it was last told."""
        engine, memory = self._weighed
        if self.ready is None or engine is self.ready:
            return memory if self.ready else None
        return self.ready.memory

    @property
    def failure(self) -> MillraceError | None:
        return self._keeper.failure

    @property
    def restarts(self) -> int:
        return self._keeper.restarts

    @property
    def pid(self) -> int | None:
        return self._keeper.pid

    async def start(self) -> None:
        """Returns once the engine's process is on its way, so that it loads while others work."""
        await self._keeper.start()

    def waits(self, stage: str) -> None:
        """Say what an engine that is not started yet waits for."""
        self._keeper.stage = stage

    @property
    def ready_since(self) -> float | None:
        """When the engine came up for the first time, on the monotonic clock."""
        return self._keeper.ready_since

    async def settled(self) -> None:
        """Wait for the first start to succeed; raises why it did not."""
        await self._keeper.settled()
        await self.adapters.settled()

    async def stop(self, grace: float = CLOSING_PATIENCE) -> None:
        self._keeper.state = State.STOPPED
        self.queries.drop()
        self.adapters.stopped()
        self.fail_all(EngineUnavailable("The server is shutting down."))
        await self._keeper.stop(grace)

    def admit(self, answers: int) -> None:
        """Raise why that many more answers cannot be taken: too much load, no engine to be had."""
        if self.state in (State.FAILED, State.STOPPED):
            raise self.failure or EngineUnavailable("The engine has stopped.")
        self.admission.check(self.in_flight.answers_by_caller(), answers)

    def expect(self, answers: int) -> AbstractContextManager[Callable[[int], None]]:
        """The same for requests that come one after the other: their places are kept meanwhile."""
        self.admit(answers)
        return self.admission.reserve(answers)

    def submit(
        self,
        id: str,
        request: Submit,
        *,
        endpoint: str = "",
        caller: str = "",
        timeout: float | None = None,
    ) -> InFlight:
        """Take a request that was admitted, or raise that its id is in use."""
        self._number(id, caller, request)
        active = InFlight(
            id, request, self._abandon, idle=self._idle, endpoint=endpoint, caller=caller
        )
        self._enter(active, timeout)
        return active

    def encode(
        self,
        id: str,
        request: Encode,
        *,
        endpoint: str = "",
        caller: str = "",
        timeout: float | None = None,
    ) -> EncodingInFlight:
        """The same for texts that are to become numbers."""
        self._number(id, caller, request)
        active = EncodingInFlight(id, request, self._abandon, endpoint, caller)
        self._enter(active, timeout)
        return active

    def _number(self, id: str, caller: str, request: Submit | Encode) -> None:
        if self.in_flight.is_taken(id, caller):
            raise BadRequest(f"A request with the id '{id}' is running.", param="id")
        request.id = next(self._numbers)
        try:
            encoder.encode(request)
        except (msgspec.EncodeError, OverflowError, TypeError, ValueError) as error:
            raise BadRequest(f"The request cannot be passed on to the engine: {error}.") from error

    def _enter(self, active: EngineRequest, timeout: float | None) -> None:
        self.in_flight.add(active)
        self.metrics.arrived(active)
        if timeout is not None:
            loop = asyncio.get_running_loop()
            active.timer = loop.call_later(timeout, self._expire, active, timeout)
        self._hand(active.number)
        self._count_queue()

    def finish_choice(self, active: InFlight, choice: int) -> None:
        """The front has all it wants of a choice: free its row."""
        active.open.discard(choice)
        if active.running:
            self._keeper.send(AbortChoice(active.number, choice))
        self._settle(active)

    def knows(self, id: str, caller: str) -> bool:
        """Whether a request, or a part of a group, of this caller and id is running."""
        return self.in_flight.has(id, caller)

    def cancel(self, id: str, viewer: str | None = None) -> int:
        """End a request, or all parts of a group, with an error event; returns how many there were.

        A `viewer` cancels requests of its own alone: those of others are not there for it.
        """
        return self.cancel_all([r for r in self.in_flight.named(id) if r.visible_to(viewer)])

    def cancel_all(self, found: Sequence[EngineRequest]) -> int:
        """End any requests that are in flight."""
        # Backwards: those that the engine has not been given yet take nobody's place in it.
        in_slices(reversed(found), self._cancel)
        return len(found)

    def _cancel(self, active: EngineRequest) -> None:
        if self.in_flight.get(active.number) is active:
            self._end(active, "cancelled", Cancelled("The request was cancelled."))

    async def cache(self, *, clear: bool = False) -> CacheReport:
        """What the engine's prefix cache holds, after dropping it all if `clear` says so."""
        await patiently(self._keeper.settled())
        if self.state is not State.READY:
            raise self.failure or not_ready(self.state.value)
        return await self.queries.ask(clear=clear)

    def fail_all(self, error: MillraceError) -> None:
        for active in list(self.in_flight.values()):
            self._end(active, "error", error)

    def _expire(self, active: EngineRequest, timeout: float) -> None:
        if self.in_flight.get(active.number) is active:
            text = f"The request was not finished within its timeout of {timeout:g} seconds."
            self._end(active, "timeout", DeadlineExceeded(text))

    def _abandon(self, active: EngineRequest) -> None:
        if self.in_flight.get(active.number) is active:
            self._end(active, "disconnected", None)

    def _end(self, active: EngineRequest, outcome: Outcome, error: MillraceError | None) -> None:
        """Let go of a request: here, in the engine, and in the books."""
        self.in_flight.remove(active)
        active.outcome = outcome
        if error is not None:
            active.fail(error)
        others_may = self._suspicion.ended(active.number)
        if outcome not in ("ok", "error") and active.running:
            self._keeper.send(Abort(active.number))
        active.open.clear()
        if active.timer is not None:
            active.timer.cancel()
        seconds = time.monotonic() - active.arrived
        self.admission.saw(seconds)
        self.metrics.ended(active, seconds)
        self._count_queue()
        told = active.summary(seconds) | {"model": self.metrics.model}
        log.info("request ended", extra={"fields": told})
        self.adapters.tidy()
        if others_may or self.in_flight.unsent:
            self._hand_over()

    def _count_queue(self) -> None:
        self.metrics.queue(self.in_flight.unanswered)
        if not self.in_flight:
            self.metrics.idle()
            self.when_idle()

    def _hand_over(self) -> None:
        """Give the engine all requests it may have now."""
        if self.state is State.READY:
            order = self.in_flight.in_turns(self._suspicion.order(self.in_flight.unsent))
            in_slices(itertools.takewhile(self._engine_has_room, order), self._hand)

    def _engine_has_room(self, number: int) -> bool:
        """Whether the engine may be given a request: the parts of a wide one beyond what a queue holds wait
        here, since an engine looks at all that wait in it at every step. A caller has its share of that
        room, whatever others have."""
        room = self.admission.room
        if self.in_flight.in_engine < room:
            return True
        active = self.in_flight.get(number)
        return active is not None and self.in_flight.is_within_share(active.queue_caller, room)

    def _hand(self, number: int) -> None:
        """Give the engine a request, if it may have it now."""
        active = self.in_flight.get(number)
        if active is None or active.running or not active.open or self.state is not State.READY:
            return
        if not self._engine_has_room(number):
            return
        if self.adapters.may_run(active.adapter) and self._suspicion.may_run(number):
            self.in_flight.sent(active)
            try:
                suspicion = self._suspicion
                begin = active.begin(suspicion.behind(number), apart=suspicion.suspects(number))
                self._keeper.send(begin)
            except Exception as error:
                self._failed(active, error)

    def _settle(self, active: EngineRequest) -> None:
        if not active.open and self.in_flight.get(active.number) is active:
            self._end(active, "ok", None)

    def engine_ready(self) -> None:
        if self.ready is not None and self.ready.max_running:
            self.admission.max_running = self.ready.max_running
        self.adapters.engine_ready()
        self._hand_over()

    def engine_failed(self, failure: MillraceError) -> None:
        self._keeper.give_up(failure)
        self.queries.drop()
        self.adapters.stopped()
        self.fail_all(failure)
        self.when_failed(failure)

    def engine_gone(self, gone: EngineGone, working: Sequence[int]) -> None:
        """Say so, and decide who goes on."""
        self.queries.drop()
        lost = self.adapters.engine_gone()
        self.metrics.restarted()
        running = {r.number: r for r in self.in_flight.values() if r.running}
        self.in_flight.engine_gone()
        milestones = {number: active.milestone for number, active in running.items()}
        for active in running.values():
            active.running = False
            active.deaths += 1
        guilty = self._suspicion.died(milestones, working, gone.cause)
        log.error(
            "the engine is gone (%s) while it worked on %s of %d requests; starting it again",
            gone,
            [running[n].id for n in working if n in running],
            len(running),
        )
        for number, deaths in guilty.items():
            text = (
                f"The engine died {deaths} times while it worked on this request; "
                f"the last time, {gone}."
            )
            self._end(running[number], "error", EngineUnavailable(text))
        for active in [r for r in self.in_flight.values() if r.adapter in lost]:
            error = EngineUnavailable("Engines died while they loaded the request's adapter.")
            self._end(active, "error", error)

    def engine_garbled(self, requests: Sequence[int]) -> None:
        for active in [self.in_flight[n] for n in requests if n in self.in_flight]:
            self._failed(active, ValueError("the engine's answer is garbled"))

    def engine_said(self, message: FromEngine) -> None:
        match message:
            case Step():
                self._stepped(message)
            case CacheReport():
                self.metrics.cache(message.memory.bytes, message.disk.bytes if message.disk else 0)
                self.queries.heard(message)
            case PicturesWanted():
                self._supply.wanted(self.in_flight.get(message.id), message.digests)
            case CacheChanged():
                self.queries.heard(message)
            case Failed(code=code, message=text, id=int(number)):
                if active := self.in_flight.get(number):
                    self._end(active, "error", from_code(code, text))
            case _ if isinstance(message, AdapterAnswer):
                self._adapter_answered(message)

    def _adapter_answered(self, message: AdapterAnswer) -> None:
        if (error := self.adapters.heard(message)) is not None:
            for active in [r for r in self.in_flight.values() if r.adapter == message.slot]:
                self._end(active, "error", error)
        self._hand_over()

    def _stepped(self, step: Step) -> None:
        self.metrics.stepped(step)
        if step.memory is not None:
            self._weighed = self.ready, step.memory
        others_may = False
        for part in step.parts:
            if active := self.in_flight.get(part.id):
                try:
                    self._take(active, part)
                except Exception as error:  # what is wrong with one request is no other's business
                    self._failed(active, error)
                if self._suspicion.watches:
                    others_may |= self._suspicion.progressed(active.number, active.milestone)
        if others_may:
            self._hand_over()
        if not self.in_flight:
            # The step was on its way when the last request left: it is not the last word.
            self.metrics.idle()

    def _take(self, active: EngineRequest, part: StepPart) -> None:
        match part, active:
            case RowTokens(), InFlight():
                self._row(active, part)
            case Prefilled(), InFlight():
                self.metrics.prefilled(active.progress(part))
            case Scoring() | Selected(), InFlight():
                self.metrics.selected(active.choose(part))
            case PromptLogprobs(), InFlight():
                active.scores(part)
            case Encoded(), EncodingInFlight():
                first = active.first_token is None
                self.metrics.prefilled(active.take(part))
                if first:
                    self.in_flight.answered(active)
                    self.metrics.began(active)
                    self._count_queue()
                self._settle(active)
            case _:
                raise ValueError(f"a {type(part).__name__} is no answer to it")

    def _row(self, active: InFlight, row: RowTokens) -> None:
        first, before = active.first_token is None, active.last_token
        active.take(row)
        if first:
            self.in_flight.answered(active)
            self.metrics.first_token(active)
            self._count_queue()
        self.metrics.token(None if first else active.last_token - before, len(row.tokens))
        self._settle(active)

    def _failed(self, active: EngineRequest, error: Exception) -> None:
        """A fault of ours in what one request needs: it ends, the engine lets go of it."""
        log.error("request %s failed", active.id, exc_info=error)
        if self.in_flight.get(active.number) is active:
            self._keeper.send(Abort(active.number))
            self._end(active, "error", RequestFailed(f"The request failed: {error}."))
