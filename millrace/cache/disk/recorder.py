"""Brings the index on disk up to date with the catalogue, and copes when it cannot."""

from __future__ import annotations

import sqlite3

from millrace.cache.disk.board import Board
from millrace.cache.disk.events import Dropped, Trouble
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.index import Index
from millrace.cache.disk.records import Blob, Changes
from millrace.cache.disk.room import READ_ONLY, TRIES, Room


class Recorder:
    def __init__(self, board: Board, folder: Folder, index: Index, room: Room) -> None:
        self._board = board
        self._folder = folder
        self._index = index
        self._room = room
        self._failures = 0
        self.superseded: list[Blob] = []
        """Files whose users have others: deleted once the index says so, too."""

    def record(self, *, times: bool = False) -> None:
        """Write what changed, times of use only if asked to. If that fails, it waits."""
        board = self._board
        with board.lock:
            if not board.writable or not (times or board.catalogue.waiting):
                return
        try:
            changes = self._affordable()
            if changes:
                self._index.write(changes)
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
            return
        self._failures = 0
        with board.lock:
            board.say(*board.catalogue.learned())
            board.catalogue.trash += self.superseded
        self.superseded = []
        board.wake()
        self._room.empty_trash()

    def close(self) -> None:
        try:
            self._index.close()
        except sqlite3.Error as error:
            self._board.tell(Trouble(f"The index could not be closed: {error}.", "index"))

    def _affordable(self) -> Changes:
        """The changes, and room for them: made by evicting, or else by not keeping what is new."""
        board = self._board
        tries = 0
        while True:
            with board.lock:
                changes = board.catalogue.take_changes()
            lack = self._room.ask(self._index.cost(changes)) if changes else 0
            if lack <= 0 or tries == TRIES:
                return changes
            tries += 1
            if not self._room.evict(lack):
                with board.lock:
                    board.catalogue.keep_changes()
                    board.say(Dropped(board.catalogue.drop(board.catalogue.unrecorded())))
                board.wake()
                self._room.empty_trash()

    def _failed(self, error: sqlite3.Error | OSError) -> None:
        board, where = self._board, self._folder.path
        name = getattr(error, "sqlite_errorname", "") or ""
        self._failures += 1
        with board.lock:
            board.catalogue.keep_changes()
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            try:
                self._index.remake()
            except (sqlite3.Error, OSError) as again:
                board.give_up("index", f"The prefix cache in {where} is off: {again}.")
                return
            with board.lock:
                board.catalogue.change_all()
            message = f"The index in {where} was damaged, and is made anew."
        else:
            message = f"The index in {where} cannot be written: {error}."
        denied = isinstance(error, OSError) and error.errno in READ_ONLY
        if denied or name.startswith("SQLITE_READONLY") or self._failures >= TRIES:
            board.give_up("read-only", f"The prefix cache in {where} is off: {error}.")
        else:
            board.tell(Trouble(message, "index"))
