"""The engine's adapters: their folders read on a thread of their own, and put into the model's slots.

What the cache holds for an adapter is told apart by the digest of the files that were read, so that another
adapter of the same name finds nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from millrace.engine.turn import PlaceAdapter
from millrace.errors import AdapterError
from millrace.models.adapters.fitting import Shape, fitted
from millrace.models.adapters.folder import Adapter, read
from millrace.models.adapters.slots import AdapterSlots
from millrace.protocol import AdapterLoaded, AdapterRefused, AdapterUnloaded, LoadAdapter, Submit
from millrace.sizes import format_bytes

log = logging.getLogger("millrace.engine")

_MARK = "\x01"


class Adapters:
    def __init__(self, slots: AdapterSlots, room: int, refusal: str | None = None) -> None:
        """`room` is how many bytes all adapters may take; with a `refusal`, none is taken."""
        self._refusal = refusal
        self._slots = slots
        self._room = room
        self._shapes: Mapping[str, Shape] = {}
        self._reader: ThreadPoolExecutor | None = None
        self._read: dict[int, Adapter] = {}
        self._digests: dict[int, str] = {}

    def begin(self, load: LoadAdapter) -> Future[Adapter]:
        """Start to read a folder; numbers and files only, so that running streams feel little of it."""
        if self._refusal is not None:
            refused: Future[Adapter] = Future()
            refused.set_exception(AdapterError(f"The adapter '{load.name}': {self._refusal}"))
            return refused
        self._know_shapes()
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="millrace-adapters")
        return self._reader.submit(self._fitted, load.name, load.path, load.digest)

    def was_read(self, load: LoadAdapter, adapter: Adapter) -> None:
        self._read[load.slot] = adapter

    def place(self, operation: PlaceAdapter) -> AdapterLoaded | AdapterRefused:
        slot, name = operation.slot, operation.name
        try:
            adapter = self._read.pop(slot, None)
            if adapter is None:  # of a turn that is carried out again
                self._know_shapes()
                adapter = self._fitted(name, operation.path, operation.digest)
            needed = self._slots.needs(slot, adapter.modules)
            if needed > self._room:
                raise AdapterError(
                    f"The adapter '{name}' does not fit: with it, adapters take {format_bytes(needed)} "
                    f"of {format_bytes(self._room)}. Raise --lora-memory, or unload others."
                )
            self._slots.place(slot, adapter.modules)
        except AdapterError as error:
            return AdapterRefused(slot, error.code, error.message)
        except Exception as error:  # whatever a device raises; what was there before still is
            log.exception("the adapter %s cannot be placed", name)
            return AdapterRefused(slot, AdapterError.code, f"The adapter '{name}' failed: {error}")
        self._digests[slot] = adapter.digest
        log.info("adapter %s: rank %d, %d modules", name, adapter.rank, len(adapter.modules))
        return AdapterLoaded(
            slot, adapter.digest, adapter.rank, len(adapter.modules), self._slots.nbytes
        )

    def remove(self, slot: int) -> AdapterUnloaded:
        self._digests.pop(slot, None)
        self._slots.remove(slot)
        return AdapterUnloaded(slot, self._slots.nbytes)

    def check(self, request: Submit) -> None:
        """Raise ValueError where a request's adapter is not there."""
        if request.adapter and request.adapter not in self._slots.slots:
            raise ValueError("The request's adapter is not loaded.")

    def salted(self, request: Submit) -> Submit:
        """The request with its adapter in its salt, so that state is never another adapter's."""
        salt = request.cache_salt
        if request.adapter:
            salt = f"{_MARK}{self._digests.get(request.adapter, '')}{_MARK}{salt}"
        elif salt.startswith(_MARK):
            salt = f"{_MARK}{_MARK}{salt}"
        return (
            msgspec.structs.replace(request, cache_salt=salt)
            if salt != request.cache_salt
            else request
        )

    def _fitted(self, name: str, path: str, digest: str) -> Adapter:
        adapter = read(Path(path), self._room)
        if digest and adapter.digest != digest:
            raise AdapterError(
                f"The files of the adapter '{name}' in {path} are not those that were loaded; "
                "load it again."
            )
        return fitted(adapter, self._shapes, name)

    def _know_shapes(self) -> None:
        """On the thread that owns the model; what a reader compares with never changes."""
        self._shapes = self._shapes or self._slots.shapes
