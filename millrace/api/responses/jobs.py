"""Background responses: work that outlives the connection it came from.

A job keeps its wire events, so that any number of clients can follow it, from any point on. When it
has ended, the store is where it is found; one that could not be stored stays in memory for a while.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import zlib
from collections.abc import AsyncIterator
from typing import Any

from millrace.api.answer import KEEP_ALIVE
from millrace.api.responses.answering import Answering, encode
from millrace.api.responses.parts import Wire
from millrace.api.responses.plan import ResponsePlan
from millrace.api.responses.store import Store
from millrace.caller import current_departure
from millrace.errors import MillraceError
from millrace.serving.running import Running

log = logging.getLogger("millrace.api")

_LOST_SECONDS = 600.0
"""How long an ended response that could not be stored can be asked for."""
_MOST_LOST = 64
"""How many of them are held; the oldest go first."""


class BackgroundJob:
    def __init__(self, id: str, plan: ResponsePlan, running: Running, store: Store) -> None:
        self.id = id
        self._plan = plan
        self._running = running
        self._store = store
        self._answering = Answering(plan.machine(id), running, self._save)
        self._log: list[bytes] = []
        self._news = asyncio.Event()
        self.ended = asyncio.Event()
        self.lost = False
        """It could not be stored when it ended."""

    def response(self) -> dict[str, Any]:
        self._notice()
        return self._answering.machine.response()

    async def run(self) -> None:
        try:
            async for event in self._answering.events():
                if event is not None:
                    self._tell([event])
                self._notice()
        finally:
            self._running.close()
            self.ended.set()
            self._tell([])

    async def follow(self, start: int, patience: float) -> AsyncIterator[bytes]:
        """The job's events from number `start` on, as they come."""
        while True:
            while start < len(self._log):
                yield self._log[start]
                start += 1
            if self.ended.is_set():
                return
            try:
                async with asyncio.timeout(patience):
                    await self._news.wait()
            except TimeoutError:
                yield KEEP_ALIVE

    async def cancel(self) -> None:
        """Returns once the job has ended, which may have been a moment before."""
        self._plan.model.client.cancel(self._plan.request.id)
        await self.ended.wait()

    def _notice(self) -> None:
        """The engine has taken the request up: it is no longer queued.

        That is told third at the earliest: an answer begins with `created` and `queued`.
        """
        if len(self._log) >= 2 and self._running.phase != "queued":
            self._tell(self._answering.machine.start())

    def _tell(self, events: list[Wire]) -> None:
        self._log += map(encode, events)
        reported, self._news = self._news, asyncio.Event()
        reported.set()

    async def _save(self, last: list[Wire]) -> None:
        response = self._answering.machine.response()
        events = await asyncio.to_thread(packed, [*self._log, *map(encode, last)])
        try:
            await self._store.put(
                response,
                self._plan.given,
                events=events,
                conversation=None if self._answering.machine.error else self._plan.conversation,
            )
        except Exception:
            self.lost = True
            # What was stored at the start would be found as still running.
            try:
                await self._store.delete(self.id)
            except MillraceError as error:
                log.error("the response %s stays stored as running: %s", self.id, error.message)
            raise


class Jobs:
    """The background responses that are under way."""

    def __init__(self) -> None:
        self._jobs: dict[str, BackgroundJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: dict[str, asyncio.TimerHandle] = {}

    def get(self, id: str) -> BackgroundJob | None:
        return self._jobs.get(id)

    async def start(
        self, id: str, plan: ResponsePlan, running: Running, store: Store
    ) -> BackgroundJob:
        """Keep what is known, so that the response can be asked for from now on, and go to work."""
        job = BackgroundJob(id, plan, running, store)
        try:
            await store.put(job.response(), plan.given, running=True)
        except BaseException:
            running.close()
            raise
        self._jobs[id] = job
        # It goes on when the client that asked for it is gone.
        own = contextvars.copy_context()
        own.run(current_departure.set, None)
        task = asyncio.create_task(self._run(job), context=own)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def finished(self, patience: float) -> None:
        """Wait for all of them, that many seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience)

    async def _run(self, job: BackgroundJob) -> None:
        try:
            await job.run()
        finally:
            if job.lost:
                self._hold(job.id)
            else:
                del self._jobs[job.id]

    def _hold(self, id: str) -> None:
        while len(self._lost) >= _MOST_LOST:
            self.forget(next(iter(self._lost)))
        loop = asyncio.get_running_loop()
        self._lost[id] = loop.call_later(_LOST_SECONDS, self.forget, id)

    def forget(self, id: str) -> bool:
        """Let go of an ended response that could not be stored; says whether there was one."""
        timer = self._lost.pop(id, None)
        if timer is None:
            return False
        timer.cancel()
        del self._jobs[id]
        return True


def packed(events: list[bytes]) -> bytes:
    """A job's events as they are kept. Of a long answer they are megabytes: not for the event loop."""
    return zlib.compress(b"".join(events), 1)


def replay(compressed: bytes, start: int) -> list[bytes]:
    """The events of an ended job from number `start` on. Not for the event loop either."""
    log = zlib.decompress(compressed).split(b"\n\n")
    return [event + b"\n\n" for event in log[start:] if event]
