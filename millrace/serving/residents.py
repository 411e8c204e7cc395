"""The models that are held, or asked for: their engines started and ended as `residency` decides.

It knows lives of models and memory; names, profiles and who asks are the registry's. A load belongs to
nobody: it goes on when whoever asked for it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from millrace import descriptors
from millrace.config import EngineConfig
from millrace.errors import EngineUnavailable, MillraceError, ModelError, OutOfMemory
from millrace.models.description import FolderStamp
from millrace.serving.catalogue import ModelSpec
from millrace.serving.client import EngineClient
from millrace.serving.instance import Instance, LoadFailure
from millrace.serving.memory import OtherServers
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.residency import (
    Absent,
    Decision,
    End,
    ModelStart,
    Need,
    Reason,
    decide,
    never_fits,
)
from millrace.sizes import format_bytes

log = logging.getLogger("millrace.serving")

_UNKNOWN = 1 << 62
"""A limit that only the engine's device can tell."""
_TEXT_PATIENCE = 300.0
"""Seconds without use after which the text side of a model that is not loaded is let go of."""
_WHY: dict[Reason, str] = {
    "room": "to make room",
    "expired": "unused for its time to live",
    "asked": "asked to",
}


class Opener(Protocol):
    """Makes the parts of a model."""

    def check(self, spec: ModelSpec) -> None:
        """Raise what is wrong with its files: not for the event loop."""

    def need(self, spec: ModelSpec) -> Need:
        """From its files: not for the event loop."""

    def engine_config(self, spec: ModelSpec, state: int | None) -> EngineConfig:
        """What its engine is told when it gets so many bytes for state."""

    def client(self, spec: ModelSpec, config: Callable[[], EngineConfig]) -> EngineClient: ...

    async def text(self, spec: ModelSpec, client: EngineClient) -> ServedModel: ...

    async def tidy(self) -> None:
        """Called when a model has left."""


class Residents:
    def __init__(
        self,
        opener: Opener,
        metrics: Metrics,
        limit: int | None,
        absent: Callable[[str], Absent],
        others: OtherServers | None = None,
    ) -> None:
        """`absent` tells whom a model that is loaded should leave room for. What `others` hold when a
        load is decided is not there for this server's models."""
        self._opener = opener
        self._metrics = metrics
        self._whole = _UNKNOWN if limit is None else limit
        self._others = others
        self._limit = self._whole
        self.taken_by_others = 0
        """Bytes that other servers held when the limit was set."""
        self._look_at_others()
        self._absent = absent
        self._current: dict[str, Instance] = {}
        """By name, the life that requests are given to."""
        self._all: dict[int, Instance] = {}
        self._failed: dict[str, LoadFailure] = {}
        """By name, until a load succeeds."""
        self.when_lost: Callable[[Instance], None] = lambda instance: None
        """Called with a model that could not be loaded, or kept up."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._deciding = self._again = False
        self._stopped = False

    @property
    def limit(self) -> int | None:
        """Bytes that all models may take together."""
        return None if self._limit == _UNKNOWN else self._limit

    @property
    def reserved(self) -> int:
        return sum(i.reserved for i in self._all.values())

    @property
    def all(self) -> list[Instance]:
        return list(self._all.values())

    def current(self, name: str) -> Instance | None:
        return self._current.get(name)

    def failure(self, name: str) -> LoadFailure | None:
        """Why it could not be loaded the last time; None if it was, or was not tried."""
        return self._failed.get(name)

    def forget(self, name: str) -> None:
        """It is to be tried again, whatever happened."""
        self._failed.pop(name, None)

    def _look_at_others(self) -> None:
        """Set the limit: what there is for models, less what other servers hold now."""
        if self._whole != _UNKNOWN:
            self.taken_by_others = self._others.held() if self._others is not None else 0
            self._limit = max(0, self._whole - self.taken_by_others)
            self._metrics.other_servers(self.taken_by_others)
        self._metrics.memory_limit(0 if self._limit == _UNKNOWN else self._limit)

    def check(self, name: str, need: Need) -> None:
        """Raise if there can never be room for it."""
        self._look_at_others()
        places = [p for i in self._all.values() if (p := i.place) is not None]
        if never_fits(need, self._limit, places):
            raise self._too_large(name, need)

    def has_room(self, need: Need) -> bool:
        """Whether there is room without anybody's leaving."""
        return self.reserved + need.smallest <= self._limit

    def want(self, instance: Instance, need: Need, files: FolderStamp) -> None:
        """Have it loaded from these files when there is room."""
        instance.need, instance.phase, instance.since = need, "wished", time.monotonic()
        instance.files = files
        instance.client.waits("waiting for memory")
        self.wake()

    async def stop(self) -> None:
        """End all engines."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        instances = list(self._all.values())
        for instance in instances:
            self._leave(instance)
        await asyncio.gather(*(i.ended.wait() for i in instances))
        for task in self._tasks:
            task.cancel()

    def begin(self, spec: ModelSpec, *, pinned: bool) -> Instance:
        """A new life, with its text side alone."""
        if self._stopped:  # nobody would ever load it, or tell those who wait
            raise EngineUnavailable("The server is shutting down.")
        instance = Instance(spec, self._opener.client, pinned=pinned)
        instance.client.when_idle = lambda: self._idle(instance)
        instance.client.when_failed = lambda error: self._lost(instance, error)
        self._all[instance.key] = self._current[spec.name] = instance
        self._spawn(self._open_text(instance))
        return instance

    def _idle(self, instance: Instance) -> None:
        instance.used = time.monotonic()
        self.wake()

    def _too_large(self, name: str, need: Need) -> OutOfMemory:
        held = ", ".join(
            f"{i.spec.name} {format_bytes(i.reserved)}{' (pinned)' if i.pinned else ''}"
            for i in self._all.values()
            if i.reserved
        )
        beside = self._others.in_words() if self._others is not None else ""
        return OutOfMemory(
            f"The model '{name}' needs at least {format_bytes(need.smallest)} "
            f"({format_bytes(need.fixed)} for weights and work, the rest for state), and all models "
            f"together may take {format_bytes(self._limit)}. Set aside now: {held or 'nothing'}. "
            + (f"{beside} " if beside else "")
            + "Take a smaller model, unpin others, "
            + ("end another server, " if beside else "")
            + "or give the server more with --memory.",
        )

    def wake(self) -> None:
        """Decide anew, and act."""
        if self._deciding or self._stopped:
            self._again = True
            return
        self._deciding = self._again = True
        try:
            while self._again:
                self._again = False
                self._act()
        finally:
            self._deciding = False

    def _act(self) -> None:
        now = time.monotonic()
        instances = list(self._all.values())
        decision = decide(
            self._limit,
            [p for i in instances if (p := i.place) is not None],
            sorted((w for i in instances if (w := i.wish) is not None), key=lambda w: w.since),
            now,
            self._absent,
        )
        self._carry_out(decision)
        self._drop_texts(now)
        self._metrics.memory_reserved(self.reserved)
        for instance in self._all.values():
            if instance.reserved:
                self._metrics.of(instance.spec.name).ceiling(instance.reserved)
        if self._timer is not None:
            self._timer.cancel()
        due = [] if decision.look_again is None else [decision.look_again]
        due += [
            i.used + _TEXT_PATIENCE for i in self._all.values() if i.phase == "text" and not i.busy
        ]
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.01, min(due) - now), self.wake) if due else None

    def _carry_out(self, decision: Decision) -> None:
        for key in decision.refused:
            instance = self._all[key]
            assert instance.need is not None
            self._lost(instance, self._too_large(instance.spec.name, instance.need))
        for end in decision.ends:
            self._end(self._all[end.key], end)
        for drain in decision.drains:
            self.drain(self._all[drain.key], "room", drain.sake)
        for start in decision.starts:
            self._start(self._all[start.key], start)

    def _drop_texts(self, now: float) -> None:
        for instance in list(self._all.values()):
            stale = instance.phase == "text" and now >= instance.used + _TEXT_PATIENCE
            forgone = instance.phase == "wished" and instance.draining is not None
            if (stale or forgone) and not instance.busy:
                self._leave(instance)

    def _start(self, instance: Instance, start: ModelStart) -> None:
        unknown = self._limit == _UNKNOWN
        try:
            config = self._opener.engine_config(instance.spec, None if unknown else start.state)
        except (MillraceError, OSError) as error:  # its files may be gone since it was asked for
            known = error if isinstance(error, MillraceError) else ModelError(str(error))
            self._lost(instance, known)
            return
        assert instance.need is not None
        state = (config.kv_memory or 0) + (config.cache_memory or 0 if config.cache else 0)
        state += config.picture_memory or 0
        # What the operator chose for adapters is in what it needs.
        adapters = (config.adapter_memory or 0) - (instance.spec.engine.adapter_memory or 0)
        instance.engine = config
        instance.granted = instance.need.fixed + (
            instance.need.least if unknown else state + adapters
        )
        instance.phase = "loading"
        log.info(
            "loading %s: it may take %s at most; all models, %s of %s",
            instance.spec.name,
            format_bytes(instance.reserved),
            format_bytes(self.reserved),
            "?" if unknown else format_bytes(self._limit),
        )
        self._spawn(self._load(instance))

    async def _load(self, instance: Instance) -> None:
        try:
            try:
                await instance.client.start()
            finally:
                instance.launched.set()
            await instance.client.settled()
        except MillraceError as error:
            self._lost(instance, error)
            return
        except Exception as error:  # nobody else would hear of it, and all would wait for ever
            if not isinstance(error, OSError):
                log.exception("the engine of %s cannot be started", instance.spec.name)
            why = descriptors.explain(error).removesuffix(".")
            self._lost(instance, ModelError(f"The engine's process cannot be started: {why}."))
            return
        ready = instance.client.ready
        if ready is not None and instance.phase == "loading":
            if self._limit == _UNKNOWN and ready.device_bytes:
                self._whole = self._limit = ready.device_bytes * 9 // 10
                self._metrics.memory_limit(self._limit)
                instance.granted = min(self._limit, ready.weight_bytes + 2 * ready.kv_budget)
            if instance.need is not None and ready.weight_bytes > instance.need.fixed:
                # Its files did not tell all; what is held counts from here on.
                instance.granted += ready.weight_bytes - instance.need.fixed
            self._metrics.loaded(instance.spec.name, "ok")
            self._metrics.of(instance.spec.name).ready(ready.kv_budget, ready.weight_bytes)
            log.info("loaded %s in %.1f s", instance.spec.name, ready.load_seconds)
            instance.phase = "loaded"
            self.forget(instance.spec.name)
            instance.used = time.monotonic()
            instance.settled.set()
            self.wake()

    async def _open_text(self, instance: Instance) -> None:
        if instance.phase == "loading":
            await instance.launched.wait()  # the engine takes longest, and reads meanwhile
        try:
            model = await self._opener.text(instance.spec, instance.client)
        except Exception as error:
            failure = error
            if not isinstance(error, MillraceError):
                log.exception("the model %s cannot be read", instance.spec.name)
                failure = ModelError(f"The model '{instance.spec.name}' cannot be read: {error}")
            assert isinstance(failure, MillraceError)
            self._lost(instance, failure)
            return
        if not instance.opened.done():
            instance.opened.set_result(model)
        else:
            await model.stop()

    def _lost(self, instance: Instance, error: MillraceError) -> None:
        """It cannot be loaded, or kept up: reported to all who wait, and remembered."""
        if instance.phase in ("leaving", "failed") or self._stopped:
            return
        name = instance.spec.name
        if instance.phase == "loaded":
            log.error("%s is no longer available: %s", name, error.message)
        else:
            log.error("%s cannot be loaded: %s", name, error.message)
            self._metrics.loaded(name, "failed")
        self._failed[name] = LoadFailure(error, time.monotonic(), instance)
        instance.failure = error
        self._leave(instance)
        instance.client.engine_failed(error)
        if not instance.opened.done():
            instance.opened.set_exception(error)
            instance.opened.exception()  # somebody may hear of it, or nobody
        self.when_lost(instance)

    def drain(self, instance: Instance, reason: Reason, sake: str = "") -> None:
        """It takes no more requests, and leaves when it has answered those it has."""
        if instance.draining is None:
            instance.draining, instance.sake = reason, sake
            log.info("%s takes no more requests (%s)", instance.spec.name, _why(reason, sake))
        if self._current.get(instance.spec.name) is instance:
            del self._current[instance.spec.name]

    def _end(self, instance: Instance, end: End) -> None:
        reason = instance.draining or end.reason
        why = _why(reason, end.sake or instance.sake)
        log.info("unloading %s (%s)", instance.spec.name, why)
        self._metrics.unloaded(instance.spec.name, reason)
        self._leave(instance)

    def _leave(self, instance: Instance) -> None:
        if instance.phase != "leaving":
            instance.phase = "leaving"
            if self._current.get(instance.spec.name) is instance:
                del self._current[instance.spec.name]
            self._spawn(self._bury(instance))

    async def _bury(self, instance: Instance) -> None:
        """End what runs for it; its memory counts as held until that is over."""
        began, held = time.monotonic(), instance.reserved
        if held:
            # A process that is on its way could not be ended yet.
            await instance.launched.wait()
        model = instance.model
        try:
            await (model.stop() if model is not None else instance.client.stop())
            if (group := instance.client.group) is not None:
                await group.end()  # also where no start of it was under way
        except Exception:
            log.exception("%s did not end in good order", instance.spec.name)
        if not instance.opened.done():
            instance.opened.set_exception(EngineUnavailable("The model was unloaded."))
            instance.opened.exception()
        self._metrics.of(instance.spec.name).gone()
        instance.client.when_idle = _nothing
        if instance.failure is not None:
            instance.phase = "failed"
        instance.forget()
        instance.granted = 0
        del self._all[instance.key]
        instance.settled.set()
        instance.ended.set()
        if held:
            seconds = time.monotonic() - began
            log.info(
                "%s is gone after %.1f s: the %s that it could take at most are free",
                instance.spec.name,
                seconds,
                format_bytes(held),
            )
        self.wake()
        if not self._stopped:
            del model
            await self._opener.tidy()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _why(reason: Reason, sake: str) -> str:
    return f"to make room for {sake}" if reason == "room" and sake else _WHY[reason]


def _nothing() -> None:
    """Nobody needs to hear that it is idle."""
