"""Brings the index on disk up to date with the catalogue, and copes when it cannot."""

from __future__ import annotations

import sqlite3

from millrace.cache.disk.events import Dropped, Trouble
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.index import Index
from millrace.cache.disk.quota import READ_ONLY, TRIES, Quota
from millrace.cache.disk.records import Blob, Changes
from millrace.cache.disk.shared_state import SharedState


class Recorder:
    def __init__(self, shared: SharedState, folder: Folder, index: Index, quota: Quota) -> None:
        self._shared = shared
        self._folder = folder
        self._index = index
        self._quota = quota
        self._failures = 0
        self.superseded: list[Blob] = []
        """Files whose users have others: deleted once the index says so, too."""

    def record(self, *, times: bool = False) -> None:
        """Write what changed, times of use only if asked to. If that fails, it waits."""
        shared = self._shared
        with shared.lock:
            if not shared.writable or not (times or shared.catalogue.waiting):
                return
        try:
            changes = self._affordable()
            if changes:
                self._index.write(changes)
        except (sqlite3.Error, OSError, ValueError) as error:
            self._failed(error)
            return
        self._failures = 0
        with shared.lock:
            shared.say(*shared.catalogue.learned())
            shared.catalogue.trash += self.superseded
        self.superseded = []
        shared.wake()
        self._quota.empty_trash()

    def close(self) -> None:
        try:
            self._index.close()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._shared.tell(Trouble(f"The index could not be closed: {error}.", "index"))

    def _affordable(self) -> Changes:
        """The changes, and room for them: made by evicting, or else by not keeping what is new."""
        shared = self._shared
        tries = 0
        while True:
            with shared.lock:
                changes = shared.catalogue.take_changes()
            lack = self._quota.ask(self._index.cost(changes)) if changes else 0
            if lack <= 0 or tries == TRIES:
                return changes
            tries += 1
            if not self._quota.evict(lack):
                with shared.lock:
                    shared.catalogue.keep_changes()
                    shared.say(Dropped(shared.catalogue.drop(shared.catalogue.unrecorded())))
                shared.wake()
                self._quota.empty_trash()

    def _failed(self, error: Exception) -> None:
        shared, where = self._shared, self._folder.path
        name = getattr(error, "sqlite_errorname", "") or ""
        self._failures += 1
        with shared.lock:
            shared.catalogue.keep_changes()
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            try:
                self._index.remake()
            except (sqlite3.Error, OSError, ValueError) as again:
                shared.give_up("index", f"The prefix cache in {where} is off: {again}.")
                return
            with shared.lock:
                shared.catalogue.change_all()
            message = f"The index in {where} was damaged, and is made anew."
        else:
            message = f"The index in {where} cannot be written: {error}."
        denied = isinstance(error, OSError) and error.errno in READ_ONLY
        if denied or name.startswith("SQLITE_READONLY") or self._failures >= TRIES:
            shared.give_up("read-only", f"The prefix cache in {where} is off: {error}.")
        else:
            shared.tell(Trouble(message, "index"))
