"""The disk tier as the engine sees it: calls that return at once, and events that say what came.

All calls come from one thread. They change the picture in memory and leave the disk to two threads,
one that writes and one that reads, so that a slow disk never holds up a step.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from millrace.cache.disk import files
from millrace.cache.disk.board import Board
from millrace.cache.disk.catalogue import Catalogue
from millrace.cache.disk.events import DiskUnavailable, Dropped, Event, StoredNode, Trouble
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.index import BASE, Index
from millrace.cache.disk.reader import Reader
from millrace.cache.disk.recorder import Recorder
from millrace.cache.disk.records import Blob
from millrace.cache.disk.room import Room
from millrace.cache.disk.writer import Writer
from millrace.cache.payload import Payload

LEAST = 4 << 20
"""Bytes below which a budget is of no use."""
BACKLOG = 512 << 20
"""Bytes that may wait to be written; beyond them, puts are dropped."""


class DiskTier:
    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        budget: int,
        *,
        keep_free: int = 1 << 30,
        backlog: int = BACKLOG,
        sync: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or make the model's folder inside `folder`. Raises DiskUnavailable. Without `sync`
        a loss of power may cost what was written last, never more."""
        if budget < LEAST:
            raise DiskUnavailable(f"A prefix cache on disk needs at least {LEAST:,} bytes.")
        self.budget = budget
        self._largest_backlog = backlog
        self._clock = clock
        self._folder = Folder(folder, fingerprint, budget, keep_free, clock)
        self._folder.open()
        try:
            catalogue = Catalogue()
            self._board = Board(catalogue)
            self._folder.lack(self._folder.measured(), BASE)
            index = Index(self._folder.path, fingerprint, budget, sync=sync)
            damaged = catalogue.load(index.rows(), self._folder.sizes())
            self._folder.sweep({b.id for n in catalogue.nodes.values() for b in n.blobs})
            self._room = Room(self._board, self._folder, index, clock, sync=sync)
            recorder = Recorder(self._board, self._folder, index, self._room)
            self._writer = Writer(self._board, self._folder, self._room, recorder, sync=sync)
            self._writer.prepare()
        except (sqlite3.Error, OSError) as error:
            self._folder.close()
            raise DiskUnavailable(
                f"The prefix cache in {self._folder.path} cannot be opened: {error}. Remove the "
                f"folder, or choose another one with --cache-dir."
            ) from error
        self._board.poll()  # nobody knows yet what went while opening
        if index.remade:
            self._board.tell(
                Trouble(f"The index in {self._folder.path} was unusable: the cache is empty.")
            )
        if damaged:
            self._board.tell(
                Trouble(
                    f"{len(damaged)} files of the prefix cache in {self._folder.path} are damaged "
                    f"and were dropped: they have not the size they were written with.",
                    "damage",
                )
            )
        self._reader = Reader(self._board, self._folder)
        self._writer.start()
        self._reader.start()

    @property
    def bytes(self) -> int:
        return self._room.bytes

    @property
    def entries(self) -> int:
        return len(self._board.catalogue.nodes)

    @property
    def backlog(self) -> int:
        """Bytes that wait to be written."""
        return self._board.backlog

    def nodes(self) -> list[StoredNode]:
        """All that is on disk, parents before children. No payload is read."""
        with self._board.lock:
            return self._board.catalogue.listed()

    def put(
        self,
        node: int,
        parent: int,
        salt: str,
        tokens: Sequence[int],
        segment: Payload | None,
        checkpoint: Payload | None,
    ) -> None:
        """Store a node below its parent, which was put before. Of a node that is known only what
        it lacks is taken. The arrays must not change from now on. Stored or Dropped answers."""
        if not tokens or node <= 0:
            raise ValueError("a node has a positive id and at least one token")
        if segment and any(a.shape[2] != len(tokens) for a in segment.arrays.values()):
            raise ValueError("a segment has one position on axis 2 for each token")
        board = self._board
        with board.lock:
            known = board.catalogue.nodes.get(node)
            if known is not None:
                segment = segment if known.segment is None else None
                checkpoint = checkpoint if known.checkpoint is None else None
            s = self._queued(segment, len(tokens), late=known is not None)
            c = self._queued(checkpoint, 0, late=known is not None)
            new = [b for b in (s, c) if b is not None]
            if known is None and (not self._accepts(new) or not self._has(parent)):
                board.say(Dropped([node]))
                return
            if known is None:
                board.catalogue.add(node, parent, salt, tokens, s, c, self._clock())
                self._enqueue(new)
            else:
                self._complete(node, s, c)

    def put_checkpoint(self, node: int, checkpoint: Payload) -> None:
        """Add the state at a node's end. Stored says whether it is there in the end."""
        board = self._board
        with board.lock:
            known = board.catalogue.nodes.get(node)
            if known is None:
                board.say(Dropped([node]))
            else:
                lacks = known.checkpoint is None
                self._complete(
                    node, None, self._queued(checkpoint, 0, late=True) if lacks else None
                )

    def split(self, node: int, at: int, upper: int) -> None:
        """The node's first `at` tokens become the new node `upper`, between it and its parent."""
        board = self._board
        with board.lock:
            known = board.catalogue.nodes.get(node)
            if known is None:
                board.say(Dropped([upper]))
                return
            if not 0 < at < len(known.tokens) or upper in board.catalogue.nodes:
                raise ValueError(f"node {node} cannot be split at {at} into {upper}")
            board.catalogue.split(node, at, upper)
            board.ask()

    def read(self, ticket: int, wants: list[tuple[int, bool, bool]]) -> None:
        """Load nodes (node, segment?, checkpoint?) as they are now; one Loaded answers."""
        with self._board.lock:
            self._board.catalogue.touch([want[0] for want in wants], self._clock())
            self._reader.ask(ticket, wants)

    def touch(self, nodes: Iterable[int]) -> None:
        """Used now."""
        with self._board.lock:
            self._board.catalogue.touch(nodes, self._clock())

    def forget(self, nodes: Iterable[int]) -> None:
        """Drop nodes and all below them; of those that were not named, Dropped tells."""
        named = set(nodes)
        with self._board.lock:
            dropped = self._board.catalogue.drop(named)
            self._board.say(Dropped([id for id in dropped if id not in named]))
            self._board.ask()

    def clear(self) -> None:
        with self._board.lock:
            self._board.catalogue.clear()
            self._board.ask()

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order."""
        return self._board.poll()

    def set_wakeup(self, call: Callable[[], None]) -> None:
        """Have `call` called, from another thread, when there is something to poll."""
        self._board.set_wakeup(call)

    def settle(self, timeout: float) -> bool:
        """Wait until all calls so far are on disk; whether they are."""
        board = self._board
        with board.lock:
            asked = board.asked
            return board.work.wait_for(lambda: board.done >= asked, timeout)

    def close(self, timeout: float) -> None:
        """Write what waits as long as time allows, then stop."""
        board = self._board
        with board.lock:
            if board.deadline is not None:
                return
            board.deadline = time.monotonic() + timeout
            board.work.notify_all()
        self._reader.close(timeout)
        # One write may be on its way when time is up. The lock must not go before it has ended.
        if self._writer.join(timeout + 10):
            self._folder.close()

    def _complete(self, node: int, segment: Blob | None, checkpoint: Blob | None) -> None:
        new = [b for b in (segment, checkpoint) if b is not None]
        if self._accepts(new):
            self._board.catalogue.complete(node, segment, checkpoint)
            self._enqueue(new)
        else:
            self._board.catalogue.complete(node, None, None)
            self._enqueue([])

    def _enqueue(self, new: list[Blob]) -> None:
        self._board.queue.extend(new)
        self._board.backlog += sum(b.size for b in new)
        self._board.ask()

    def _has(self, parent: int) -> bool:
        return parent == 0 or parent in self._board.catalogue.nodes

    def _queued(self, payload: Payload | None, length: int, *, late: bool) -> Blob | None:
        if payload is None:
            return None
        return self._board.catalogue.blob(payload, files.head(payload), length, late=late)

    def _accepts(self, new: list[Blob]) -> bool:
        board = self._board
        room = board.backlog + sum(b.size for b in new) <= self._largest_backlog
        return board.writable and board.deadline is None and (room or not new)
