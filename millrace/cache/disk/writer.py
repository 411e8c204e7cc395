"""The thread that writes: in each turn the files that wait, then their rows.

It alone touches the index and deletes files. Nothing it meets ends it: a write that fails is
dropped and told, and a disk that takes no writes at all turns writing off.
"""

from __future__ import annotations

import contextlib
import threading
import time

from millrace.cache.disk import files
from millrace.cache.disk.events import Dropped
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.quota import Quota
from millrace.cache.disk.recorder import Recorder
from millrace.cache.disk.records import Blob
from millrace.cache.disk.shared_state import SharedState

TICK = 2.0
"""Seconds between looks at what others need, and between writes of times of use."""
WORTH_CUTTING = 64 << 10
"""Unused bytes for which a file is written again."""

_BATCH_FILES = 32
_BATCH_BYTES = 64 << 20


class DiskWriter:
    def __init__(
        self, shared: SharedState, folder: Folder, quota: Quota, recorder: Recorder, *, sync: bool
    ) -> None:
        self._shared = shared
        self._folder = folder
        self._quota = quota
        self._recorder = recorder
        self._sync = sync
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)

    def prepare(self) -> None:
        """Before the first use: keep to a budget that may have become smaller."""
        self._recorder.record(times=True)
        self._quota.make(0)
        self._recorder.record(times=True)
        self._folder.settle(self._quota.bytes)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        shared = self._shared
        looked = time.monotonic()
        over = False
        while not over:
            with shared.lock:
                if not (shared.queue or shared.asked > shared.done or shared.deadline is not None):
                    shared.work.wait(TICK)
                asked, deadline = shared.asked, shared.deadline
                late = deadline is not None and time.monotonic() >= deadline
                batch = [] if late else self._take()
            due = time.monotonic() - looked > TICK
            looked = time.monotonic() if due else looked
            try:
                self._turn(batch, due=due, closing=deadline is not None)
            except Exception as error:
                with shared.lock:
                    shared.queue.extendleft(reversed(batch))
                shared.give_up("writer", f"The prefix cache on disk is off: {error!r}.")
            with shared.lock:
                late = deadline is not None and time.monotonic() >= deadline
                over = deadline is not None and (late or not shared.queue)
                if not shared.queue:
                    shared.done = max(shared.done, asked)
                    shared.work.notify_all()
        with shared.lock:
            shared.writable = False
        self._recorder.close()
        self._folder.settle(self._quota.bytes)

    def _turn(self, batch: list[Blob], *, due: bool, closing: bool) -> None:
        self._quota.begin(batch)
        wrote = bool(batch)
        while batch:
            self._write(batch[0])
            del batch[0]
        if wrote and self._sync:
            files.sync_folder(self._folder.path)
        self._quota.empty_trash()
        self._recorder.record(times=due or closing)
        if not closing:
            self._cut_loose()
        if due:
            with contextlib.suppress(OSError):
                self._quota.make(0)
            self._recorder.record()
        self._folder.settle(self._quota.bytes)

    def _take(self) -> list[Blob]:
        batch: list[Blob] = []
        size = 0
        queue = self._shared.queue
        while queue and len(batch) < _BATCH_FILES and size < _BATCH_BYTES:
            batch.append(queue.popleft())
            size += batch[-1].size
        return batch

    def _write(self, blob: Blob) -> None:
        shared = self._shared
        with shared.lock:
            wanted = bool(blob.users) and shared.writable
        trouble = self._quota.place(blob) if wanted else None
        with shared.lock:
            shared.backlog -= blob.size
            if not blob.written:
                blob.payload = None
                dropped = shared.catalogue.withdraw(blob)
                shared.say(*([trouble] if trouble else ()), Dropped(dropped))
            elif not blob.users:
                shared.catalogue.trash.append(blob)
        if not blob.written:
            shared.wake()

    def _cut_loose(self) -> None:
        """Rewrite files of which only a small first part is still in use."""
        shared = self._shared
        with shared.lock:
            loose = shared.catalogue.take_loose(WORTH_CUTTING) if shared.writable else []
        for old, length in loose:
            try:
                self._cut(old, length)
            except files.Damaged as error:
                shared.damaged(old, str(error))
            except OSError:
                continue  # a read will say what is wrong with it
        if self._recorder.superseded:
            self._recorder.record()

    def _cut(self, old: Blob, length: int) -> None:
        shared = self._shared
        # Not worth evicting anything for; there will be room after the next eviction.
        if not self._quota.make(old.size * length // old.length, evict=False):
            with shared.lock:
                shared.catalogue.loose.add(old)
            return
        part = files.cut(files.read(self._folder.file(old.id), old.size, old.crc), 0, length)
        with shared.lock:
            new = shared.catalogue.blob(part, files.head(part), length)
        self._quota.place(new, evict=False)
        with shared.lock:
            if not new.written:
                shared.catalogue.loose.add(old)
            elif old.users:
                shared.catalogue.replace(old, new)
                self._recorder.superseded.append(old)
            else:
                shared.catalogue.trash.append(new)
