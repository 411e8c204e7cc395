"""The bytes this model takes, and how room is made for more: before anything is written."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

from millrace.cache.disk import files
from millrace.cache.disk.events import Dropped, Trouble
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.index import Index
from millrace.cache.disk.records import Blob, Changes
from millrace.cache.disk.shared_state import SharedState
from millrace.sizes import format_bytes

TRIES = 8
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}

_FULL = {errno.ENOSPC, errno.EDQUOT}
_ACCOUNT = files.on_disk(1)
_SPARE = 64
"""Eviction makes room for more than one write: this part of the budget."""


class Quota:
    def __init__(
        self,
        shared: SharedState,
        folder: Folder,
        index: Index,
        clock: Callable[[], float],
        *,
        sync: bool,
    ) -> None:
        self._shared = shared
        self._folder = folder
        self._index = index
        self._clock = clock
        self._sync = sync
        kept = {b.id: b.size for n in shared.catalogue.nodes.values() for b in n.blobs}
        self._payload = sum(files.on_disk(size) for size in kept.values())
        self._owed = index.cost(Changes())
        """Bytes that the index may grow by at the end of this turn."""
        self._granted = 0
        """What we may have without asking again in this turn."""

    @property
    def bytes(self) -> int:
        """What this model takes of the budget."""
        return self._payload + self._index.bytes + _ACCOUNT

    def begin(self, batch: list[Blob]) -> None:
        """A turn begins: these files are written, and at its end the index once."""
        self._granted = 0
        self._owed = self._index.cost(Changes())
        with self._shared.lock:
            rows = self._shared.catalogue.rows(id for blob in batch for id in blob.users)
        self._owed += sum(self._index.cost_of_row(row) for row in rows)
        total = sum(files.on_disk(blob.size) for blob in batch)
        if len(batch) > 1 and total < self._folder.budget // 4:
            with contextlib.suppress(OSError):  # then each file asks for itself, and can tell
                self.make(total)

    def make(self, need: int, *, evict: bool = True) -> bool:
        """Whether `need` bytes may be written, and the rows that come with them."""
        if need and self.bytes + need + self._owed <= self._granted:
            return True
        for _ in range(TRIES):
            lack = self.ask(need + self._owed if need else 0)
            if lack <= 0:
                return True
            if not evict or not self.evict(lack):
                return False
        return False

    def ask(self, need: int) -> int:
        """Bytes to give up before `need` more may be written; at 0 they are ours."""
        own = self.bytes
        lack = self._folder.lack(own, need)
        self._granted = own if lack else own + need
        return lack

    def evict(self, lack: int) -> bool:
        shared = self._shared
        with shared.lock:
            spare = self._folder.budget // _SPARE
            victims = shared.catalogue.victims(lack, spare, self._clock())
            shared.say(Dropped(shared.catalogue.drop(victims)))
        shared.wake()
        self._owed += self._index.cost_of_gone(len(victims))
        self.empty_trash()
        return bool(victims)

    def empty_trash(self) -> None:
        with self._shared.lock:
            trash = self._shared.catalogue.take_trash()
        for blob in trash:
            if files.remove(self._folder.file(blob.id)):
                self._payload -= files.on_disk(blob.size)

    def place(self, blob: Blob, *, evict: bool = True) -> Trouble | None:
        """Write one file; what stood in the way, if there is something new to say about it."""
        payload, need = blob.payload, files.on_disk(blob.size)
        assert payload is not None
        try:
            if not self.make(need, evict=evict):
                return Trouble(
                    f"There is no room in {self._folder.root} for {format_bytes(need)} of prefix cache: "
                    f"the budget is {format_bytes(self._folder.budget)}, or the volume is nearly full.",
                    "room",
                )
            self._payload += need
            try:
                crc = files.write(self._folder.file(blob.id), blob.head, payload, sync=self._sync)
            except BaseException:
                self._payload -= need
                raise
        except OSError as error:
            return self._refused(error)
        with self._shared.lock:
            self._shared.catalogue.written(blob, crc)
        return None

    def _refused(self, error: OSError) -> Trouble | None:
        where, why = self._folder.path, error.strerror or error
        if error.errno in READ_ONLY:
            self._shared.give_up(
                "read-only", f"{where} cannot be written ({why}): the prefix cache there is off."
            )
            return None
        if error.errno in _FULL:
            return Trouble(
                f"The volume of {where} is full: some of the prefix cache is not kept.", "full"
            )
        return Trouble(f"A write to the prefix cache in {where} failed: {why}.", "write")
