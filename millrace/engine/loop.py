"""The engine's loop: hear, decide, execute, tell. Runs on the one thread that owns MLX."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millrace.cache.observations import AnyObservation
from millrace.cache.residency import Operations
from millrace.engine.adapters import Adapters
from millrace.engine.decider import Decider
from millrace.engine.executor import UNKNOWN, Executor
from millrace.engine.grammar import Grammars, PendingGrammar
from millrace.engine.transport import Transport
from millrace.engine.turn import Outcome, Seen, Turn
from millrace.engine.vision_inputs import VisionInputs
from millrace.errors import MillraceError
from millrace.flight import FlightRecorder, NullRecorder
from millrace.models.device import memory_now
from millrace.protocol import (
    Abort,
    AdapterRefused,
    Failed,
    LoadAdapter,
    Picture,
    Shutdown,
    Step,
    Submit,
    ToEngine,
)
from millrace.protocol.prefixes import CacheChanged, CacheQuery, CacheReport, TierReport

if TYPE_CHECKING:
    from concurrent.futures import Future

    from millrace.cache.store import SegmentStore
    from millrace.models.adapters.folder import Adapter

log = logging.getLogger("millrace.engine")

CLOSING_SECONDS = 10.0
"""How long the disk may take to write what it has not at the end."""
DISK_WAIT = 0.002
"""Seconds between looks at the disk while there is nothing else to do."""
WEIGH_EVERY = 0.5
"""Seconds between two reports of the device's memory while something runs."""
CHECK_EVERY = 60.0
"""Seconds between two looks at the cache's own order, in idle moments."""

Journal = Callable[[Seen, Turn, list[Picture]], None]
"""Shown what was seen and decided, and the pixels that came: whoever decides needs none, but whoever
carries the same turns out again does."""
Closing = Callable[[Outcome, Operations], None]


class Engine:
    def __init__(
        self,
        decider: Decider,
        executor: Executor,
        transport: Transport,
        grammars: Grammars | None = None,
        store: SegmentStore | None = None,
        recorder: FlightRecorder | None = None,
        *,
        adapters: Adapters,
        vision_inputs: VisionInputs,
        journal: Journal | None = None,
        closing: Closing | None = None,
        closed: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`journal` is called turn by turn, `closing` with what came of the last and what is to be written
        then, and `closed` when it is."""
        self._decider = decider
        self._executor = executor
        self._transport = transport
        self._grammars = grammars
        self._store = store
        self._recorder = recorder or NullRecorder()
        self._compiling: list[tuple[Submit, PendingGrammar]] = []
        """Requests whose grammar is not there yet: they are heard when it is."""
        self._adapters = adapters
        self._vision_inputs = vision_inputs
        self._reading: list[tuple[LoadAdapter, Future[Adapter]]] = []
        """Adapters whose files are being read: they are heard of when that is done."""
        self._journal = journal
        self._closing, self._closed = closing, closed
        self._clock = clock
        self._outcome = Outcome()
        self._stopping = False
        self._checked = clock()
        self._weighed = 0.0
        self._found: list[AnyObservation] = list(store.found()) if store else []

    def run(self) -> None:
        while not self._stopping:
            self.turn()
        self._close()

    @property
    def busy(self) -> bool:
        return self._decider.busy or bool(self._outcome.failed or self._compiling or self._reading)

    def turn(self) -> None:
        if not self.busy:
            self._recorder.idle()
        messages = self._transport.receive(self._wait())
        if any(isinstance(m, Shutdown) for m in messages):
            self._stopping = True
            return
        prepared = self._prepared(messages)
        seen = Seen(self._clock(), prepared, self._outcome, self._observed())
        turn = self._decider.decide(seen)
        if self._journal is not None:
            self._journal(seen, turn, [m for m in messages if isinstance(m, Picture)])
        for failed in turn.refused:
            self._transport.send(failed)
        for wanted in turn.wanted:
            self._transport.send(wanted)
        if turn.progress or turn.scoring or turn.selected:
            self._report(
                Step(prefilled=turn.progress, scoring=turn.scoring, selected=turn.selected)
            )
        self._outcome = self._executor.execute(turn, self._report)
        for answer in (*self._outcome.failed, *self._outcome.adapters):
            self._transport.send(answer)
        if (cache := self._decider.cache) is not None and (changes := cache.changes()):
            self._transport.send(CacheChanged(changes))
        self._answer(messages)

    def _prepared(self, messages: list[ToEngine]) -> list[ToEngine]:
        """The messages in order, requests with a grammar once that has been compiled, adapters once they
        have been read."""
        heard: list[ToEngine] = self._read_adapters(messages)
        for message in messages:
            if isinstance(message, LoadAdapter):
                continue
            if isinstance(message, Picture):
                # Whoever decides needs no pixel.
                self._vision_inputs.arrived(message)
                message = Picture(message.digest, {})
            if isinstance(message, Submit):
                message = self._adapters.salted(message)
            if isinstance(message, Submit) and self._grammars is not None:
                self._recorder.working([message.id], UNKNOWN)
                self._compiling.append((message, self._grammars.begin(message)))
            else:
                heard.append(message)
        gone = {m.id for m in messages if isinstance(m, Abort)}
        waiting: list[tuple[Submit, PendingGrammar]] = []
        for request, pending in self._compiling:
            if not pending.done:
                if request.id not in gone:
                    waiting.append((request, pending))
                else:
                    pending.abandon()
                continue
            try:
                pending.result()
                heard.append(request)
            except MillraceError as error:
                self._transport.send(Failed(error.code, error.message, request.id))
            except Exception as error:  # whatever a compiler raises is this request's alone
                self._transport.send(Failed("invalid_request", str(error), request.id))
        self._compiling = waiting
        # A request that is heard late is aborted after it, not before.
        return sorted(heard, key=lambda m: not isinstance(m, Submit))

    def _read_adapters(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Begin to read those that are wanted now; returns those that have been read."""
        for message in messages:
            if isinstance(message, LoadAdapter):
                self._reading.append((message, self._adapters.begin(message)))
        heard: list[ToEngine] = []
        waiting: list[tuple[LoadAdapter, Future[Adapter]]] = []
        for load, pending in self._reading:
            if not pending.done():
                waiting.append((load, pending))
                continue
            try:
                self._adapters.was_read(load, pending.result())
                heard.append(load)
            except MillraceError as error:
                self._transport.send(AdapterRefused(load.slot, error.code, error.message))
            except Exception as error:  # whatever a broken file makes of its reader
                log.exception("the adapter %s cannot be read", load.name)
                self._transport.send(AdapterRefused(load.slot, "invalid_adapter", repr(error)))
        self._reading = waiting
        return heard

    def _observed(self) -> list[AnyObservation]:
        """What the disk has to say: at first, all that it has."""
        if self._store is None:
            return []
        found, self._found = self._found, []
        return [*found, *self._store.poll()]

    def _wait(self) -> float | None:
        """How long to wait for messages: not at all while there is work."""
        if not self.busy:
            self._check()
            return self._decider.again
        idle = self._reading and not (self._decider.busy or self._compiling)
        return DISK_WAIT if idle or self._decider.stuck else 0.0

    def _report(self, step: Step) -> None:
        step.running = self._decider.running
        step.kv_bytes = self._executor.nbytes + self._executor.draft_bytes
        if step.running == 0 or self._clock() - self._weighed >= WEIGH_EVERY:
            self._weighed = self._clock()
            step.memory = memory_now()
        step.pictures = self._decider.pictures.counts()
        if (cache := self._decider.cache) is not None:
            step.cache_bytes = cache.nbytes + self._decider.draft_cached
            step.cache_disk_bytes = cache.disk_bytes
        self._transport.send(step)

    def _answer(self, messages: list[ToEngine]) -> None:
        for query in messages:
            if isinstance(query, CacheQuery):
                cache = self._decider.cache
                empty = CacheReport(query.id, False, TierReport(0), None, {})
                self._transport.send(cache.report(query.id) if cache is not None else empty)

    def _check(self) -> None:
        """In an idle moment, see that the cache's books are in order."""
        cache = self._decider.cache
        if cache is None or self._clock() - self._checked < CHECK_EVERY:
            return
        self._checked = self._clock()
        cache.check()

    def state(self) -> object:
        """What the executor holds, as plain values."""
        return self._executor.state()

    def features(self, digest: str) -> Any:
        """What an encoded picture has become, where it is held."""
        return self._vision_inputs.features(digest)

    def _close(self) -> None:
        writes = self._decider.closing(self._clock())
        if self._closing is not None:
            self._closing(self._outcome, writes)
        if self._store is not None:
            self._store.close(writes, CLOSING_SECONDS)
        if self._closed is not None:
            self._closed()
