"""The thread that writes: in each turn the files that wait, then their rows.

It alone touches the index and deletes files. Nothing it meets ends it: a write that fails is
dropped and told, and a disk that takes no writes at all turns writing off.
"""

from __future__ import annotations

import contextlib
import threading
import time

from millrace.cache.disk import files
from millrace.cache.disk.board import Board
from millrace.cache.disk.events import Dropped
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.recorder import Recorder
from millrace.cache.disk.records import Blob
from millrace.cache.disk.room import Room

TICK = 2.0
"""Seconds between looks at what others need, and between writes of times of use."""
WORTH_CUTTING = 64 << 10
"""Unused bytes for which a file is written again."""

_BATCH_FILES = 32
_BATCH_BYTES = 64 << 20


class Writer:
    def __init__(
        self, board: Board, folder: Folder, room: Room, recorder: Recorder, *, sync: bool
    ) -> None:
        self._board = board
        self._folder = folder
        self._room = room
        self._recorder = recorder
        self._sync = sync
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)

    def prepare(self) -> None:
        """Before the first use: keep to a budget that may have become smaller."""
        self._recorder.record(times=True)
        self._room.make(0)
        self._recorder.record(times=True)
        self._folder.settle(self._room.bytes)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        board = self._board
        looked = time.monotonic()
        over = False
        while not over:
            with board.lock:
                if not (board.queue or board.asked > board.done or board.deadline is not None):
                    board.work.wait(TICK)
                asked, deadline = board.asked, board.deadline
                late = deadline is not None and time.monotonic() >= deadline
                batch = [] if late else self._take()
            due = time.monotonic() - looked > TICK
            looked = time.monotonic() if due else looked
            try:
                self._turn(batch, due=due, closing=deadline is not None)
            except Exception as error:
                with board.lock:
                    board.queue.extendleft(reversed(batch))
                board.give_up("writer", f"The prefix cache on disk is off: {error!r}.")
            with board.lock:
                late = deadline is not None and time.monotonic() >= deadline
                over = deadline is not None and (late or not board.queue)
                if not board.queue:
                    board.done = max(board.done, asked)
                    board.work.notify_all()
        with board.lock:
            board.writable = False
        self._recorder.close()
        self._folder.settle(self._room.bytes)

    def _turn(self, batch: list[Blob], *, due: bool, closing: bool) -> None:
        self._room.begin(batch)
        wrote = bool(batch)
        while batch:
            self._write(batch[0])
            del batch[0]
        if wrote and self._sync:
            files.sync_folder(self._folder.path)
        self._room.empty_trash()
        self._recorder.record(times=due or closing)
        if not closing:
            self._cut_loose()
        if due:
            with contextlib.suppress(OSError):
                self._room.make(0)
            self._recorder.record()
        self._folder.settle(self._room.bytes)

    def _take(self) -> list[Blob]:
        batch: list[Blob] = []
        size = 0
        queue = self._board.queue
        while queue and len(batch) < _BATCH_FILES and size < _BATCH_BYTES:
            batch.append(queue.popleft())
            size += batch[-1].size
        return batch

    def _write(self, blob: Blob) -> None:
        board = self._board
        with board.lock:
            wanted = bool(blob.users) and board.writable
        trouble = self._room.place(blob) if wanted else None
        with board.lock:
            board.backlog -= blob.size
            if not blob.written:
                blob.payload = None
                dropped = board.catalogue.withdraw(blob)
                board.say(*([trouble] if trouble else ()), Dropped(dropped))
            elif not blob.users:
                board.catalogue.trash.append(blob)
        if not blob.written:
            board.wake()

    def _cut_loose(self) -> None:
        """Rewrite files of which only a small first part is still in use."""
        board = self._board
        with board.lock:
            loose = board.catalogue.take_loose(WORTH_CUTTING) if board.writable else []
        for old, length in loose:
            try:
                self._cut(old, length)
            except files.Damaged as error:
                board.damaged(old, str(error))
            except OSError:
                continue  # a read will say what is wrong with it
        if self._recorder.superseded:
            self._recorder.record()

    def _cut(self, old: Blob, length: int) -> None:
        board = self._board
        # Not worth evicting anything for; there will be room after the next eviction.
        if not self._room.make(old.size * length // old.length, evict=False):
            with board.lock:
                board.catalogue.loose.add(old)
            return
        part = files.cut(files.read(self._folder.file(old.id), old.size, old.crc), 0, length)
        with board.lock:
            new = board.catalogue.blob(part, files.head(part), length)
        self._room.place(new, evict=False)
        with board.lock:
            if not new.written:
                board.catalogue.loose.add(old)
            elif old.users:
                board.catalogue.replace(old, new)
                self._recorder.superseded.append(old)
            else:
                board.catalogue.trash.append(new)
