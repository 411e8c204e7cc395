"""One life of a model in this server: its text side here, its engine in a process once there is room.

Requests may be given to it before its engine is up; they wait in the engine's client. When it is to
leave it takes no more of them, and a later request begins another life.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from millrace.config import EngineConfig
from millrace.errors import BrokenFiles, EngineUnavailable, MillraceError
from millrace.models.description import FolderStamp
from millrace.serving.adapters import ServedAdapter
from millrace.serving.catalogue import ModelSpec
from millrace.serving.client import EngineClient
from millrace.serving.model import ServedModel
from millrace.serving.residency import Need, Place, Reason, Wish, pause_left

Phase = Literal["text", "wished", "loading", "loaded", "leaving", "failed"]
_keys = itertools.count(1)


class Instance:
    def __init__(
        self,
        spec: ModelSpec,
        client: Callable[[ModelSpec, Callable[[], EngineConfig]], EngineClient],
        *,
        pinned: bool,
    ) -> None:
        self.key = next(_keys)
        self.spec = spec
        self.engine = spec.engine
        """What its engine is told, once it is known what it may take."""
        self.client = client(spec, lambda: self.engine)
        self.pinned = pinned
        self.ttl = spec.ttl
        self.phase: Phase = "text"
        """With the text side alone, which is enough to count tokens; asked for; and so on. One that could
        not be loaded, or kept up, is `failed` once nothing of it runs."""
        self.opened: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self.launched = asyncio.Event()
        """Its engine's process is on its way."""
        self.ended = asyncio.Event()
        self.settled = asyncio.Event()
        """It is loaded, or will not be."""
        self.failure: MillraceError | None = None
        self.files: FolderStamp = ()
        """Its folder when its load began."""
        self.need: Need | None = None
        self.granted = 0
        """Bytes that were set aside for it when its engine was started."""
        self.leases = 0
        self.users = 0
        """Leases of those who want an answer."""
        self.used = self.since = time.monotonic()
        self.draining: Reason | None = None
        self.sake = ""
        """The model that it makes room for."""
        self.at_start = False
        """Whether the server is not up before it is."""

    @property
    def model(self) -> ServedModel | None:
        """As soon as its text side is read."""
        done = self.opened.done() and not self.opened.cancelled() and not self.opened.exception()
        return self.opened.result() if done else None

    def forget(self) -> None:
        """Let go of its text side, which is large, whoever still holds the instance."""
        if self.model is not None:
            self.opened = asyncio.get_running_loop().create_future()
            why = self.failure or EngineUnavailable("The model was unloaded.")
            self.opened.set_exception(why)
            self.opened.exception()

    @property
    def reserved(self) -> int:
        """Bytes that are not there for others: what it was given, and adapters that came later."""
        if not self.granted:
            return 0
        return self.granted + max(
            0, self.client.adapters.nbytes - (self.engine.adapter_memory or 0)
        )

    @property
    def busy(self) -> bool:
        return self.leases > 0 or bool(self.client.in_flight)

    @property
    def waiting(self) -> int:
        """Those who want an answer of it, while none can be had."""
        return self.users if self.phase != "loaded" else 0

    @property
    def expires(self) -> float | None:
        """When it leaves unless it is used before; while it is in use, as if that had just ended."""
        if self.ttl is None or self.pinned or self.phase != "loaded":
            return None
        return (time.monotonic() if self.busy else self.used) + self.ttl

    @property
    def place(self) -> Place | None:
        """The memory it holds, if it holds any."""
        if self.phase == "text" or self.phase == "wished" or self.phase == "failed":
            return None
        if not self.reserved:
            return None
        return Place(
            self.key,
            self.spec.name,
            self.reserved,
            self.phase,
            self.used,
            busy=self.busy,
            pinned=self.pinned and self.draining is None,
            ttl=self.ttl,
            draining=self.draining is not None,
        )

    @property
    def wish(self) -> Wish | None:
        if self.phase != "wished" or self.need is None:
            return None
        return Wish(self.key, self.spec.name, self.need, self.since)


@dataclass(frozen=True)
class LoadFailure:
    """Why a model could not be loaded, or kept up."""

    error: MillraceError
    when: float
    instance: Instance

    @property
    def files(self) -> FolderStamp:
        """What it was to be loaded from: other files are another attempt."""
        return self.instance.files

    @property
    def pause(self) -> float:
        """Seconds for which the same files are not tried again."""
        if isinstance(self.error, BrokenFiles):
            return 0.0  # to look at them again is no attempt
        return pause_left(self.when, time.monotonic())


class Lease:
    """A claim on a model: as long as it is held, the model stays. Must be released."""

    def __init__(
        self,
        instance: Instance,
        tell: Callable[[], None],
        *,
        uses: bool,
        adapter: ServedAdapter | None = None,
    ) -> None:
        """`tell` is called when it was released. To look is not to use."""
        self._instance = instance
        self._adapter = adapter
        self._uses = uses
        self._tell = tell
        self._held = True
        instance.leases += 1
        instance.users += uses

    @property
    def model(self) -> ServedModel:
        """With the adapter that was asked for, though it may have been unloaded meanwhile."""
        model = self._instance.opened.result()
        return model if self._adapter is None else model.adapted(self._adapter)

    async def opened(self) -> None:
        """Wait until the model's text side can be used; raises why it cannot."""
        if not self._instance.opened.done():
            # Whoever waits may leave; the reading goes on.
            await asyncio.shield(self._instance.opened)
        self._instance.opened.result()

    async def settled(self) -> None:
        """Wait until the model is loaded; raises why it will not be."""
        await self._instance.settled.wait()
        if self._instance.failure is not None:
            raise self._instance.failure

    def release(self) -> None:
        if self._held:
            self._held = False
            self._instance.leases -= 1
            self._instance.users -= self._uses
            if self._uses:
                self._instance.used = time.monotonic()
            self._tell()
