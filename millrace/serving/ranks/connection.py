"""One start of a group of ranks, as the keeper of an engine sees it: a connection that may be gone.

Members are reached, told what to load, and watched; the first rank is an engine's process like any other.
When one is lost all are let go of: the next start begins from nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.config import EngineConfig
from millrace.distributed.handshake import Refused
from millrace.distributed.messages import (
    BEAT_SECONDS,
    CANNOT_START,
    PEER_LOST,
    SILENT_SECONDS,
    Start,
    Stop,
)
from millrace.errors import EngineUnavailable, ModelError
from millrace.flight import FlightReading
from millrace.protocol import Failed, FromEngine, Loading, Ready, ToEngine
from millrace.serving.connection import EngineGone, ProcessConnection
from millrace.serving.ranks.child import environment_of, shown
from millrace.serving.ranks.files import files_of
from millrace.serving.ranks.group import RankGroup
from millrace.serving.ranks.member import Member
from millrace.serving.suspicion import Cause
from millrace.serving.watch import Pulse, Watch, processor_time, until_ill

log = logging.getLogger("millrace.ranks")

_RETRY = 0.5
_FOLLOWS = (0, PEER_LOST, CANNOT_START)
"""How members end of what is not their own, or not theirs alone."""
_AFTERMATH = 1.5
"""Seconds after an engine's end in which a rank may turn out to be what it died of."""


class GroupConnection:
    def __init__(self, group: RankGroup, config: EngineConfig, file: Callable[[], Path]) -> None:
        self._group = group
        self._config = config
        self._file = file
        self._engine: ProcessConnection | None = None
        self._ready = False
        self._said: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._lost: asyncio.Future[EngineGone] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._guarded())]

    @property
    def pid(self) -> int | None:
        return self._engine.pid if self._engine else None

    def reading(self) -> FlightReading | None:
        return self._engine.reading() if self._engine else None

    def send(self, message: ToEngine) -> None:
        if self._engine is not None:
            self._engine.send(message)

    def send_encoded(self, message: memoryview) -> None:
        if self._engine is not None:
            self._engine.send_encoded(message)

    async def receive(self) -> FromEngine:
        hearing = asyncio.ensure_future(self._said.get())
        try:
            first: set[asyncio.Future[Any]] = {hearing, self._lost}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                return hearing.result()
        finally:
            hearing.cancel()
        raise self._lost.result()

    def kill(self, why: str, cause: Cause) -> None:
        self._lose(EngineGone(why, cause))

    async def close(self, grace: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            # Members are heard meanwhile: a rank that ends in good order compares its state once more.
            pinging = asyncio.create_task(self._keep_pinging())
            # One that is not up yet has nothing to put in order, and may wait for ranks that are gone.
            await self._engine.close(grace if self._ready else 0.0)
            pinging.cancel()
        self._group.lost_since = time.monotonic()
        for member in self._group.members:
            member.send(Stop())
        await asyncio.sleep(0)
        for member in self._group.members:
            member.close()
        if grace:
            await self._group.end()

    def _lose(self, gone: EngineGone) -> None:
        if not self._lost.done():
            self._lost.set_result(gone)
            if self._engine is not None:
                self._engine.kill(str(gone), gone.cause)

    async def _guarded(self) -> None:
        try:
            await self._start()
            await self._watch()
        except EngineGone as gone:
            self._lose(gone)
        except EngineUnavailable as error:
            self._lose(EngineGone(error.message, Cause.OUTSIDE))
        except ModelError as error:
            self._said.put_nowait(Failed(error.code, error.message))
            self._lose(EngineGone(error.message, Cause.OUTSIDE))
        except Exception as error:  # a fault in here must not look like a group that is well
            log.exception("the group of ranks cannot be kept")
            self._lose(EngineGone(f"its group failed: {error!r}", Cause.OUTSIDE))

    async def _start(self) -> None:
        members = self._group.members
        self._tell(f"looking for {len(members)} other ranks")
        # From the first that is reached: it would not wait in silence for the last.
        self._tasks.append(asyncio.create_task(self._keep_pinging()))
        reaching = [asyncio.create_task(self._reach(member)) for member in members]
        try:
            await asyncio.gather(*reaching)
        finally:
            for task in reaching:
                task.cancel()
        files = await asyncio.to_thread(files_of, Path(self._config.model))
        first, *others = self._group.seats(self._config)
        for member, config in zip(members, others, strict=True):
            member.send(Start(config, files))
        self._engine = await ProcessConnection.launch(
            shown(first), self._file(), environment_of(first)
        )
        self._tasks.append(asyncio.create_task(self._pump(self._engine)))
        self._tasks.append(asyncio.create_task(self._watch_first(self._engine)))

    async def _reach(self, member: Member) -> None:
        """Until the member's worker is there."""
        workers, ours = self._group.workers, self._group.workers.starts(member.rank)
        while True:
            try:
                if ours:
                    member.address = member.address[0], await workers.port(member.rank)
                await member.reach()
                return
            except (OSError, Refused, EngineUnavailable) as error:
                reason = error.message if isinstance(error, EngineUnavailable) else member.problem
                told = f"{member.where}: {reason}"
                self._tell(f"waiting for {told}")
                self._group.absent(told)
                if ours:
                    workers.replace(member.rank)
            await asyncio.sleep(_RETRY)

    def _tell(self, stage: str) -> None:
        self._said.put_nowait(Loading(stage))

    async def _pump(self, engine: ProcessConnection) -> None:
        try:
            while True:
                message = await engine.receive()
                if isinstance(message, Ready):
                    self._group.lost_since = None
                    self._ready = True
                self._said.put_nowait(message)
                if isinstance(message, Failed) and message.id is None:
                    self._lose(EngineGone(message.message, Cause.OUTSIDE))
                    return
        except EngineGone as gone:
            await asyncio.sleep(_AFTERMATH)
            self._lose(self._reason() or gone)
        except Exception as error:  # of a message that only the keeper can judge
            log.exception("a message of the first rank cannot be passed on")
            self._lose(EngineGone(f"it sent what is no message ({error})", Cause.OUTSIDE))

    def _reason(self) -> EngineGone | None:
        """The loss that others followed from, if some rank beside the first was lost by itself."""
        losses = [(m, loss) for m in self._group.members if (loss := m.loss()) is not None]
        return next((loss for m, loss in losses if m.beat.code != PEER_LOST), None)

    async def _keep_pinging(self) -> None:
        while True:
            for member in self._group.members:
                member.ping()
            await asyncio.sleep(BEAT_SECONDS)

    async def _watch(self) -> None:
        """Until a member is lost."""
        since: dict[int, float] = {}
        while True:
            for member in self._group.members:
                loss = member.loss()
                if loss is None:
                    continue
                first = since.setdefault(member.rank, time.monotonic())
                if member.beat.code in _FOLLOWS and time.monotonic() - first < _AFTERMATH:
                    continue  # whom it lost is heard of, and what the first rank says to the model
                if (refusal := member.refusal) is not None:
                    raise ModelError(refusal)
                if member.beat.state != "ended":
                    self._group.workers.replace(member.rank)
                log.error("%s", loss)
                raise loss
            await asyncio.sleep(BEAT_SECONDS / 2)

    async def _watch_first(self, engine: ProcessConnection) -> None:
        pid = engine.pid
        if pid is None:
            return
        watch = Watch(lambda: processor_time(pid), frozen=SILENT_SECONDS)
        pulse = await until_ill(
            lambda: engine.reading() or FlightReading(),
            watch,
            lambda pulse: None,
            every=BEAT_SECONDS,
        )
        with contextlib.suppress(asyncio.InvalidStateError):
            if pulse is Pulse.FROZEN:
                self._lose(EngineGone("rank 0 was frozen and has been ended", Cause.OUTSIDE))
            elif (reason := self._reason()) is not None:
                self._lose(reason)
            else:
                why = "the ranks' work did not go on and has been ended"
                self._lose(EngineGone(why, Cause.CRASH))
