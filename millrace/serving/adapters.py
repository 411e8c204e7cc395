"""The adapters of models: which there are, and what a model's engine has loaded of them in which slots.

A list outlives engines: one that is started again is told all of it, and a request waits here until
the engine has its adapter. An adapter that is unloaded is gone for new requests at once; those that run
with it end with it, and then its slot is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millrace.config import AdapterConfig
from millrace.errors import (
    AdapterError,
    EngineUnavailable,
    MillraceError,
    ModelNotFound,
    from_code,
)
from millrace.protocol import (
    AdapterAnswer,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)

log = logging.getLogger("millrace.serving")

MOST_ADAPTERS = 255
"""Slots that the engine has."""
_MOST_DEATHS = 2
"""Engines that may die while they load an adapter that was loaded before."""
_RETRY_SECONDS = 60.0
"""After which such an adapter is tried once more: engines die of other causes as well."""


@dataclass(eq=False)
class ServedAdapter:
    name: str
    path: str
    created: int = field(default_factory=lambda: int(time.time()))
    digest: str = ""
    """Of its files; empty until an engine has read them."""
    rank: int = 0
    modules: int = 0
    problem: str | None = None
    """Why it is not there any more, although nobody unloaded it."""
    deaths: int = 0
    """Engines that died over it, one after the other."""
    lost_at: float | None = None
    """When it was given up for those, by the monotonic clock."""
    gone: bool = False
    """New requests do not find it."""


class AdapterList:
    """The adapters of one model, over all its engines' lives."""

    def __init__(
        self,
        configured: Iterable[AdapterConfig] = (),
        elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`elsewhere` tells whether another model has an adapter of a name."""
        self.elsewhere = elsewhere
        self.configured = [ServedAdapter(one.name, one.path) for one in configured]
        self._by_name = {adapter.name: adapter for adapter in self.configured}

    def all(self) -> list[ServedAdapter]:
        return list(self._by_name.values())

    def get(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    def add(self, adapter: ServedAdapter) -> None:
        """One that was loaded takes the place of any other of its name."""
        self.retire(adapter.name)
        self._by_name[adapter.name] = adapter

    def retire(self, name: str) -> bool:
        """Take an adapter away from new requests; False if there is none."""
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            adapter.gone = True
            log.info("adapter %s is unloaded", name)
        return adapter is not None


class AdapterLibrary:
    """The adapters of all models."""

    def __init__(self) -> None:
        self._lists: dict[str, AdapterList] = {}

    def of(self, model: str, configured: Iterable[AdapterConfig] = ()) -> AdapterList:
        """A model's; those of its configuration are on it from the first time on."""
        if model not in self._lists:
            self._lists[model] = AdapterList(configured, lambda name: self._others(model, name))
        return self._lists[model]

    def _others(self, model: str, name: str) -> bool:
        return any(m != model and known.get(name) for m, known in self._lists.items())

    def find(self, *names: str | None) -> tuple[str, ServedAdapter] | None:
        """An adapter by the first of these names, and the model it is for."""
        for name in names:
            for model, adapters in self._lists.items():
                if name and (found := adapters.get(name)) is not None:
                    return model, found
        return None

    def names(self) -> list[str]:
        return [a.name for adapters in self._lists.values() for a in adapters.all()]


class AdapterDesk:
    """What one engine after another has of a model's adapters, and in which slots."""

    def __init__(
        self,
        adapters: AdapterList,
        send: Callable[[ToEngine], None],
        used: Callable[[], Iterable[int]],
    ) -> None:
        """`used` tells the slots that requests need, each as often as requests do."""
        self.list = adapters
        self._used = used
        for adapter in adapters.all():  # an engine of its own is a new attempt
            adapter.problem, adapter.deaths, adapter.lost_at = None, 0, None
        self._send = send
        self._up = self._stopped = False
        self._slots: dict[ServedAdapter, int] = {}
        self._loaded: set[ServedAdapter] = set()
        self._asked: dict[ServedAdapter, None] = {}
        """In the order in which the engine loads them."""
        self._loads: dict[ServedAdapter, asyncio.Future[None]] = {}
        """Adapters that somebody waits for, which are not on the list yet."""
        self.nbytes = 0
        """What the engine's adapters take."""
        self._changed = asyncio.Event()

    def slot_of(self, adapter: ServedAdapter | None) -> int:
        """For a request; the engine is asked for the adapter if it has not been.

        One that took its place while the request was read is what its name means now.
        """
        if adapter is None:
            return 0
        name = adapter.name
        adapter = self.list.get(name) if adapter.gone else adapter
        if adapter is None:
            raise ModelNotFound(name, [a.name for a in self.list.all()])
        self._retry(adapter)
        if adapter.problem is not None:
            raise EngineUnavailable(f"The adapter '{name}' is not loaded: {adapter.problem}")
        slot = self._assign(adapter)
        if self._up and adapter not in self._loaded and adapter not in self._asked:
            self._ask(adapter)
        return slot

    def _retry(self, adapter: ServedAdapter) -> None:
        """Forget after a while that engines died over an adapter; one more death is enough to remember."""
        if adapter.lost_at is not None and time.monotonic() > adapter.lost_at + _RETRY_SECONDS:
            adapter.problem, adapter.lost_at = None, None
            adapter.deaths = _MOST_DEATHS - 1

    def is_loaded(self, adapter: ServedAdapter) -> bool:
        return adapter in self._loaded

    def may_run(self, slot: int) -> bool:
        return not slot or any(self._slots[a] == slot for a in self._loaded)

    def running(self, adapter: ServedAdapter) -> int:
        """How many requests need it."""
        slot = self._slots.get(adapter)
        return sum(used == slot for used in self._used())

    def engine_ready(self) -> None:
        """Tell a new engine what it must have; one that was only quiet has it."""
        if self._up:
            return
        self._up = True
        self.tidy()
        for adapter in dict.fromkeys((*self.list.all(), *self._slots)):
            if adapter.problem is None and adapter not in self._loads:
                self._assign(adapter)
                self._ask(adapter)

    def engine_gone(self) -> set[int]:
        """Returns the slots of adapters that no further engine is asked for."""
        self._up = False
        self.nbytes = 0
        # The engine died over the first one, if over any: the others were waiting for it.
        adapter = next(iter(self._asked), None)
        if adapter is not None and adapter not in self._loads:
            adapter.deaths += 1
            if adapter.deaths >= _MOST_DEATHS:
                adapter.problem = "Engines died while they loaded it."
                adapter.lost_at = time.monotonic()
                log.error("adapter %s is not loaded for now: %s", adapter.name, adapter.problem)
        self._loaded, self._asked = set(), {}
        self._fail_loads("The engine died while it loaded the adapter.")
        self._changed.set()
        return {slot for adapter, slot in self._slots.items() if adapter.problem is not None}

    def stopped(self) -> None:
        """There will be no further engine."""
        self._stopped = True
        self._changed.set()
        self._fail_loads("The engine has stopped.")

    def _fail_loads(self, text: str) -> None:
        for answer in self._loads.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(text))

    def heard(self, message: AdapterAnswer) -> MillraceError | None:
        """What the engine answered; returns why requests with this slot cannot go on."""
        if isinstance(message, AdapterUnloaded):
            self.nbytes = message.nbytes
            return None
        adapter = next((a for a, slot in self._slots.items() if slot == message.slot), None)
        if adapter is None:
            return None
        self._asked.pop(adapter, None)
        self._changed.set()
        if adapter.gone:
            asyncio.get_running_loop().call_soon(self.tidy)  # whoever waited for it may have left
        waiting = self._loads.get(adapter)
        if isinstance(message, AdapterLoaded):
            self._loaded.add(adapter)
            self.nbytes = message.nbytes
            adapter.digest, adapter.rank = message.digest, message.rank
            adapter.modules, adapter.deaths, adapter.lost_at = message.modules, 0, None
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
            return None
        error = from_code(message.code, message.message)
        if waiting is None:
            adapter.problem = message.message
            log.error("adapter %s cannot be loaded: %s", adapter.name, message.message)
        elif not waiting.done():
            waiting.set_exception(error)
        return error

    async def settled(self) -> None:
        """Wait for the adapters of the configuration; raises why one of them was never to be had."""
        for adapter in self.list.configured:
            while not (adapter.digest or adapter.problem or adapter.gone):
                if self._stopped:
                    raise EngineUnavailable("The engine has stopped.")
                self._changed.clear()
                await self._changed.wait()
            if adapter.problem is not None and not (adapter.digest or adapter.gone):
                raise AdapterError(f"--lora {adapter.name}: {adapter.problem}")

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Have an adapter loaded under a name, in place of one there is if that is wished."""
        self._refuse_known(name, in_place)
        adapter = ServedAdapter(name, path, gone=True)
        self._assign(adapter)
        self._loads[adapter] = asyncio.get_running_loop().create_future()
        try:
            self._ask(adapter)
            await self._loads[adapter]
            self._refuse_known(name, in_place)
            adapter.gone = False
            self.list.add(adapter)
        finally:
            del self._loads[adapter]
            self.tidy()
        log.info("adapter %s is loaded from %s (rank %d)", name, path, adapter.rank)

    def _refuse_known(self, name: str, in_place: bool) -> None:
        if self.list.elsewhere(name):
            raise AdapterError(f"The name '{name}' is taken.", param="lora_name")
        known = self.list.get(name)
        if known is not None and known.problem is None and not in_place:
            raise AdapterError(
                f"The adapter '{name}' is loaded already; unload it first, or say load_inplace.",
                param="lora_name",
            )

    def tidy(self) -> None:
        """Free the slots of adapters that are gone and that no request needs."""
        self._changed.set()  # whoever waits for one that was unloaded waits for nothing
        leaving = [
            a for a in self._slots if a.gone and a not in self._loads and a not in self._asked
        ]
        if not leaving:
            return
        in_use = set(self._used())
        for adapter in leaving:
            if self._slots[adapter] not in in_use:
                slot = self._slots.pop(adapter)
                if adapter in self._loaded:
                    self._loaded.discard(adapter)
                    self._send(UnloadAdapter(slot))

    def _assign(self, adapter: ServedAdapter) -> int:
        if adapter not in self._slots:
            taken = set(self._slots.values())
            slot = next(s for s in range(1, len(taken) + 2) if s not in taken)
            if slot > MOST_ADAPTERS:
                raise AdapterError(f"At most {MOST_ADAPTERS} adapters can be loaded. Unload some.")
            self._slots[adapter] = slot
        return self._slots[adapter]

    def _ask(self, adapter: ServedAdapter) -> None:
        if not self._up:
            raise EngineUnavailable("The engine is not ready; load the adapter when it is.")
        self._asked[adapter] = None
        slot = self._slots[adapter]
        self._send(LoadAdapter(slot, adapter.name, adapter.path, adapter.digest))
