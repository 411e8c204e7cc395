"""The models of this server, by name: who asks for one gets a lease on it, and has it loaded if need be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from millrace.errors import (
    LoadFailed,
    MillraceError,
    ModelNotFound,
    SetupError,
    TooManyWaiting,
)
from millrace.models import short_names
from millrace.models.description import FolderStamp, stamp
from millrace.models.encoders import encoder_in
from millrace.serving.adapters import AdapterLibrary, ServedAdapter
from millrace.serving.capability import Gives, check_gives
from millrace.serving.catalogue import Catalogue, ModelSpec
from millrace.serving.facts import UNKNOWN, SpecFacts, facts_of
from millrace.serving.instance import Instance, Lease
from millrace.serving.memory import OtherServers
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.residency import Absent, Need
from millrace.serving.residents import Opener, Residents
from millrace.sizes import format_bytes

log = logging.getLogger("millrace.serving")

State = Literal["unloaded", "loading", "loaded", "failed", "broken"]
"""A model that failed could not be loaded a moment ago; the files of a broken one do not let it be."""
RECOVERY_PAUSE = 2.0
"""Seconds after which it is looked whether a model that was lost can be loaded again."""
UNSAID = -1.0
"""A time to live that a request does not mention."""


@dataclass(frozen=True)
class Standing:
    """A model that can be asked for, and how it stands with it."""

    spec: ModelSpec
    state: State
    instance: Instance | None = None
    failure: str | None = None
    facts: SpecFacts = UNKNOWN

    @property
    def window(self) -> int | None:
        """From its files, or as it was loaded from files that are gone since."""
        model = self.instance.model if self.instance is not None else None
        return model.window if model is not None else self.facts.window


class Registry:
    def __init__(
        self,
        catalogue: Catalogue,
        opener: Opener,
        metrics: Metrics,
        *,
        limit: int | None = None,
        max_waiting: int = 256,
        adapters: AdapterLibrary | None = None,
        others: OtherServers | None = None,
    ) -> None:
        """`limit` is what all models may take together, less what `others` hold."""
        self.adapters = adapters or AdapterLibrary()
        for spec in catalogue.named:
            self._enlist(catalogue, spec)
        self._catalogue = catalogue
        self._opener = opener
        self._max_waiting = max_waiting
        self._residents = Residents(opener, metrics, limit, self._absent, others)
        self._residents.when_lost = self._lost
        self._needs: dict[str, Need] = {}
        self._pins: dict[str, bool] = {}
        self._kept_up: set[str] = set()
        """Names of models that were loaded at the start, and are loaded again if they are lost."""
        self.at_start: list[Instance] = []
        """The models that were loaded at the start, whatever has become of them."""
        self._recoveries: dict[str, asyncio.Task[None]] = {}

    def _enlist(self, catalogue: Catalogue, spec: ModelSpec) -> None:
        for adapter in spec.engine.adapters:
            if catalogue.known(adapter.name) or self.adapters.find(adapter.name):
                raise SetupError(f"--lora: the name '{adapter.name}' is taken.")
        self.adapters.of(spec.name, spec.engine.adapters)

    @property
    def limit(self) -> int | None:
        """Bytes that all models may take together."""
        return self._residents.limit

    @property
    def reserved(self) -> int:
        return self._residents.reserved

    @property
    def taken_by_others(self) -> int:
        """Bytes that other servers on this machine held when the limit was set."""
        return self._residents.taken_by_others

    @property
    def is_open(self) -> bool:
        """Whether models that lie on this machine are served too, and not only those named."""
        return self._catalogue.is_open

    @property
    def named(self) -> list[ModelSpec]:
        return self._catalogue.named

    def all(self) -> list[ServedModel]:
        """The models that requests may be running on."""
        return [model for i in self._residents.all if (model := i.model) is not None]

    def hold_loaded(self) -> list[Lease]:
        """Claims on all whose engines were started; each must be released. To look is not to use."""
        started = [i for i in self._residents.all if i.phase in ("loading", "loaded")]
        return [Lease(i, self._residents.wake, uses=False) for i in started if i.model is not None]

    def instances(self) -> list[Instance]:
        return self._residents.all

    async def spec(self, *names: str | None) -> ModelSpec:
        """A model by the first of these names that there is; without one, the only model named.

        An adapter's name is its model's, too.
        """
        given = [name for name in names if name]
        if not given:
            return await self._only()
        for name in given:
            if (known := self._catalogue.known(name)) is not None:
                return known
        if (adapter := self.adapters.find(*given)) is not None:
            given = [adapter[0]]
            if (known := self._catalogue.known(adapter[0])) is not None:
                return known
        for name in given:
            if (instance := self._residents.current(name)) is not None:
                return instance.spec
            if (found := await asyncio.to_thread(self._catalogue.search, name)) is not None:
                return found
        raise ModelNotFound(given[0], await self._known_names(), await self._hint(given[0]))

    async def _hint(self, name: str) -> str:
        """How to come by a model that is not here, or which name may have been meant."""
        short = short_names.find(name) if self.is_open else None
        if short is not None:
            return f"It can be fetched ({format_bytes(short.bytes)}): millrace pull {short.name}."
        served = [n for s in await self._sound() for n in (s.name, *s.aliases)]
        served += self.adapters.names()
        return short_names.meant(name, served, table=self.is_open)

    async def _only(self) -> ModelSpec:
        named = self._catalogue.named or await self._sound()
        if len(named) == 1:
            return named[0]
        raise ModelNotFound("", await self._known_names())

    async def _sound(self) -> list[ModelSpec]:
        """Those that can be asked for and whose files are not broken."""
        return [s.spec for s in await self.standings() if s.state != "broken"]

    async def _listed(self) -> list[ModelSpec]:
        return await asyncio.to_thread(self._catalogue.listed)

    async def _known_names(self) -> list[str]:
        """All names that can be asked for: models with their aliases, and adapters."""
        return [*map(_with_aliases, await self._sound()), *self.adapters.names()]

    def preload(self, specs: Sequence[ModelSpec]) -> None:
        """Load models at the start, before anybody asks: as many as there is room for."""
        for spec in self._catalogue.named:
            self._needs[spec.name] = self._opener.need(spec)
        for number, spec in enumerate(specs):
            need = self._needs[spec.name]
            self._opener.check(spec)
            self._residents.check(spec.name, need)
            self._kept_up.add(spec.name)
            if number and not self._residents.has_room(need):
                log.warning("%s is loaded when it is asked for: there is no room yet", spec.name)
                continue
            instance = self._residents.begin(spec, pinned=self.pinned(spec))
            instance.at_start = True
            self.at_start.append(instance)
            self._residents.want(instance, need, stamp(spec.folder))

    async def lease(
        self,
        *names: str | None,
        loads: bool = True,
        ttl: float | None = UNSAID,
        gives: Gives | None = None,
    ) -> Lease:
        """The model by the first of these names; the lease must be released.

        Returns as soon as requests can be read and given to it; where that needs an engine, its load
        has begun or waits for room. `ttl` is how long it is to stay after this use. A model that does
        not give what is wanted is not loaded.
        """
        adapter = self._adapter(names)  # whatever becomes of it while its model is opened
        spec = await self.spec(*names)
        files = await self._may_load(spec, gives) if loads else ()
        if not loads and self._residents.current(spec.name) is None:
            await asyncio.to_thread(self._opener.check, spec)
        instance = self._residents.current(spec.name)
        if instance is None:
            instance = self._residents.begin(spec, pinned=self.pinned(spec))
        else:
            if loads:
                self._may_wait(instance)
            if instance.model is not None:
                instance.model.check_gives(gives)  # before it is told how long to stay
        lease = Lease(instance, self._residents.wake, uses=loads, adapter=adapter)
        if ttl is None or ttl >= 0:
            instance.ttl = ttl
        elif loads:
            instance.ttl = spec.ttl
        try:
            if loads and instance.phase == "text":
                self._residents.want(instance, self._needs[spec.name], files)
            await lease.opened()
        except BaseException:
            lease.release()
            raise
        return lease

    def _may_wait(self, instance: Instance) -> None:
        """Raise if too many do. Nothing may come between this and the lease, or more would."""
        if instance.waiting >= self._max_waiting:
            raise TooManyWaiting(
                f"{instance.waiting} requests are waiting for '{instance.spec.name}' to be loaded. "
                "Try again in a moment.",
                retry_after=5.0,
            )

    def _adapter(self, names: Sequence[str | None]) -> ServedAdapter | None:
        if any(name and self._catalogue.known(name) for name in names):
            return None
        found = self.adapters.find(*names)
        return None if found is None else found[1]

    async def _may_load(self, spec: ModelSpec, gives: Gives | None) -> FolderStamp:
        """Raise why the model cannot be had; one that is loaded can. Returns what its files are."""
        name = spec.name
        instance = self._residents.current(name)
        if instance is not None and instance.phase != "text":
            return ()
        files = await asyncio.to_thread(stamp, spec.folder)
        self._refuse_failed(name, files)
        await asyncio.to_thread(self._opener.check, spec)
        encoder = await asyncio.to_thread(encoder_in, spec.engine)
        need = await asyncio.to_thread(self._opener.need, spec)
        check_gives(name, encoder, gives)
        self._needs[name] = need
        self._residents.check(name, need)
        self._refuse_failed(name, files)  # others' attempt may have, while its files were read
        return files

    def _refuse_failed(self, name: str, files: FolderStamp) -> None:
        """Raise that the same files could not be loaded a moment ago."""
        failed = self._residents.failure(name)
        if failed is not None and failed.files == files and (left := failed.pause):
            raise LoadFailed(
                f"The model '{name}' could not be loaded a moment ago: {failed.error.message} "
                f"It is tried again in {left:.0f} seconds, when its files change, or when it is "
                f"asked for with POST /v1/models/{name}/load.",
                retry_after=left,
            )

    def _lost(self, instance: Instance) -> None:
        name = instance.spec.name
        if name in self._kept_up and name not in self._recoveries:
            self._recoveries[name] = asyncio.create_task(self._load_again(instance.spec))

    async def _load_again(self, spec: ModelSpec) -> None:
        """Load a model again that was lost, as soon as that is possible.

        Nobody may ask for it meanwhile: a server that reports to be unwell is sent no requests.
        """
        try:
            while self._residents.failure(spec.name) is not None:
                await asyncio.sleep(RECOVERY_PAUSE)
                with contextlib.suppress(MillraceError):
                    lease = await self.lease(spec.name)
                    try:
                        await lease.settled()
                    finally:
                        lease.release()
        finally:
            del self._recoveries[spec.name]

    def unavailable(self) -> list[Instance]:
        """The models that were loaded at the start and are lost: what is left of each, with the reason."""
        failures = [f for name in self._kept_up if (f := self._residents.failure(name))]
        return [f.instance for f in failures]

    async def load(self, name: str, *, ttl: float | None = UNSAID, wait: bool = True) -> None:
        """Load a model because somebody says so, even if that failed a moment ago.

        Returns when it is loaded, or raises why it is not; or returns at once.
        """
        spec = await self.spec(name)
        self._residents.forget(spec.name)
        lease = await self.lease(spec.name, ttl=ttl)
        try:
            if wait:
                await lease.settled()
        finally:
            lease.release()

    async def unload(self, name: str, *, wait: bool = True) -> bool:
        """Let a model go once it has answered what it was asked; False if it was not loaded.

        Returns when its memory is free again, or at once.
        """
        spec = await self.spec(name)
        self._residents.forget(spec.name)
        instance = self._residents.current(spec.name)
        if instance is not None and instance.phase != "text":
            self._residents.drain(instance, "asked")
            self._residents.wake()
        going = [i for i in self.instances() if i.spec.name == spec.name and i.phase != "text"]
        if wait:
            await asyncio.gather(*(i.ended.wait() for i in going))
        return bool(going)

    async def pin(self, name: str, pinned: bool) -> ModelSpec:
        """Keep a model, once it is loaded, whatever else needs room; or no longer."""
        spec = await self.spec(name)
        self._pins[spec.name] = pinned
        if (instance := self._residents.current(spec.name)) is not None:
            instance.pinned = pinned
        self._residents.wake()
        return spec

    def need(self, spec: ModelSpec) -> Need:
        """What a model takes of the memory. Reads its files: not for the event loop."""
        return self._opener.need(spec)

    def pinned(self, spec: ModelSpec) -> bool:
        return self._pins.get(spec.name, spec.pin)

    async def standings(self) -> list[Standing]:
        """All that can be asked for, broken ones too. To look is not to use."""
        specs = await self._listed()
        facts = await asyncio.to_thread(lambda: [facts_of(spec) for spec in specs])
        return [self.standing(*both) for both in zip(specs, facts, strict=True)]

    async def standing_of(self, name: str) -> Standing:
        """One that can be asked for."""
        spec = await self.spec(name)
        return self.standing(spec, await asyncio.to_thread(facts_of, spec))

    def standing(self, spec: ModelSpec, facts: SpecFacts = UNKNOWN) -> Standing:
        """How it stands with a model, as far as can be told without its files if no facts are given."""
        instance = self._residents.current(spec.name)
        if instance is not None and instance.phase in ("wished", "loading", "loaded"):
            state: State = "loaded" if instance.phase == "loaded" else "loading"
            return Standing(spec, state, instance, facts=facts)
        if facts.error is not None:
            return Standing(spec, "broken", failure=facts.error, facts=facts)
        failed = self._residents.failure(spec.name)
        if failed is not None and (failed.pause or spec.name in self._kept_up):
            return Standing(spec, "failed", failure=failed.error.message, facts=facts)
        return Standing(spec, "unloaded", facts=facts)

    async def stop(self) -> None:
        """End all engines."""
        for task in self._recoveries.values():
            task.cancel()
        await self._residents.stop()

    def _absent(self, name: str) -> Absent:
        """Room is left for models the server was told of, and for one that is found."""
        placed = {i.spec.name for i in self.instances() if i.reserved} | {name}
        others = [s.name for s in self._catalogue.named if s.name not in placed]
        if self._catalogue.is_open:
            others.append(name)  # as large a one, for want of knowing better
        return Absent(sum(self._needs[n].fixed for n in others if n in self._needs), len(others))


def _with_aliases(spec: ModelSpec) -> str:
    return f"{spec.name} (also: {', '.join(spec.aliases)})" if spec.aliases else spec.name
