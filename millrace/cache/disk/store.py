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
from millrace.cache.disk.catalogue import DiskCatalogue
from millrace.cache.disk.events import DiskUnavailable, Dropped, Event, StoredNode, Trouble
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.index import ASIDE, BASE, Index
from millrace.cache.disk.quota import Quota
from millrace.cache.disk.reader import DiskReader
from millrace.cache.disk.recorder import Recorder
from millrace.cache.disk.records import Blob
from millrace.cache.disk.shared_state import SharedState
from millrace.cache.disk.writer import DiskWriter
from millrace.cache.payload import Payload
from millrace.sizes import format_bytes

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
        server_port: int = 0,
    ) -> None:
        """Open or make the model's folder inside `folder`. Raises DiskUnavailable. Without `sync`
        a loss of power may cost what was written last, never more. Others that find the folder in use
        are told the `server_port`."""
        if budget < LEAST:
            raise DiskUnavailable(f"A prefix cache on disk needs at least {format_bytes(LEAST)}.")
        self.budget = budget
        self._largest_backlog = backlog
        self._clock = clock
        self._folder = Folder(folder, fingerprint, budget, keep_free, clock, server_port)
        self._folder.open()
        try:
            catalogue = DiskCatalogue()
            self._shared = SharedState(catalogue)
            self._folder.lack(self._folder.measured(), BASE)
            index = Index(self._folder.path, fingerprint, budget, sync=sync)
            damaged = catalogue.load(index.rows(), self._folder.sizes())
            self._folder.sweep({b.id for n in catalogue.nodes.values() for b in n.blobs})
            self._quota = Quota(self._shared, self._folder, index, clock, sync=sync)
            recorder = Recorder(self._shared, self._folder, index, self._quota)
            self._writer = DiskWriter(self._shared, self._folder, self._quota, recorder, sync=sync)
            self._writer.prepare()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._folder.close()
            raise DiskUnavailable(
                f"The prefix cache in {self._folder.path} cannot be opened: {error}. Remove the "
                f"folder, or choose another one with --cache-dir."
            ) from error
        self._shared.poll()  # nobody knows yet what went while opening
        if index.remade:
            self._shared.tell(
                Trouble(
                    f"The index in {self._folder.path} was damaged. It was set aside as {ASIDE}, "
                    f"and the prefix cache on disk begins empty."
                )
            )
        if damaged:
            self._shared.tell(
                Trouble(
                    f"{len(damaged)} files of the prefix cache in {self._folder.path} are damaged "
                    f"and were dropped: they have not the size they were written with.",
                    "damage",
                )
            )
        self._reader = DiskReader(self._shared, self._folder)
        self._writer.start()
        self._reader.start()

    @property
    def bytes(self) -> int:
        return self._quota.bytes

    @property
    def entries(self) -> int:
        return len(self._shared.catalogue.nodes)

    @property
    def backlog(self) -> int:
        """Bytes that wait to be written."""
        return self._shared.backlog

    def nodes(self) -> list[StoredNode]:
        """All that is on disk, parents before children. No payload is read."""
        with self._shared.lock:
            return self._shared.catalogue.listed()

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
        shared = self._shared
        with shared.lock:
            known = shared.catalogue.nodes.get(node)
            if known is not None:
                segment = segment if known.segment is None else None
                checkpoint = checkpoint if known.checkpoint is None else None
            s = self._queued(segment, len(tokens), late=known is not None)
            c = self._queued(checkpoint, 0, late=known is not None)
            new = [b for b in (s, c) if b is not None]
            if known is None and (not self._accepts(new) or not self._has(parent)):
                shared.say(Dropped([node]))
                return
            if known is None:
                shared.catalogue.add(node, parent, salt, tokens, s, c, self._clock())
                self._enqueue(new)
            else:
                self._complete(node, s, c)

    def put_checkpoint(self, node: int, checkpoint: Payload) -> None:
        """Add the state at a node's end. Stored says whether it is there in the end."""
        shared = self._shared
        with shared.lock:
            known = shared.catalogue.nodes.get(node)
            if known is None:
                shared.say(Dropped([node]))
            else:
                lacks = known.checkpoint is None
                self._complete(
                    node, None, self._queued(checkpoint, 0, late=True) if lacks else None
                )

    def split(self, node: int, at: int, upper: int) -> None:
        """The node's first `at` tokens become the new node `upper`, between it and its parent."""
        shared = self._shared
        with shared.lock:
            known = shared.catalogue.nodes.get(node)
            if known is None:
                shared.say(Dropped([upper]))
                return
            if not 0 < at < len(known.tokens) or upper in shared.catalogue.nodes:
                raise ValueError(f"node {node} cannot be split at {at} into {upper}")
            shared.catalogue.split(node, at, upper)
            shared.ask()

    def read(self, ticket: int, wants: list[tuple[int, bool, bool]]) -> None:
        """Load nodes (node, segment?, checkpoint?) as they are now; one Loaded answers."""
        with self._shared.lock:
            self._shared.catalogue.touch([want[0] for want in wants], self._clock())
            self._reader.ask(ticket, wants)

    def touch(self, nodes: Iterable[int]) -> None:
        """Used now."""
        with self._shared.lock:
            self._shared.catalogue.touch(nodes, self._clock())

    def forget(self, nodes: Iterable[int]) -> None:
        """Drop nodes and all below them; of those that were not named, Dropped tells."""
        named = set(nodes)
        with self._shared.lock:
            dropped = self._shared.catalogue.drop(named)
            self._shared.say(Dropped([id for id in dropped if id not in named]))
            self._shared.ask()

    def clear(self) -> None:
        with self._shared.lock:
            self._shared.catalogue.clear()
            self._shared.ask()

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order."""
        return self._shared.poll()

    def set_wakeup(self, call: Callable[[], None]) -> None:
        """Have `call` called, from another thread, when there is something to poll."""
        self._shared.set_wakeup(call)

    def settle(self, timeout: float) -> bool:
        """Wait until all calls so far are on disk; whether they are."""
        shared = self._shared
        with shared.lock:
            asked = shared.asked
            return shared.work.wait_for(lambda: shared.done >= asked, timeout)

    def close(self, timeout: float) -> None:
        """Write what waits as long as time allows, then stop."""
        shared = self._shared
        with shared.lock:
            if shared.deadline is not None:
                return
            shared.deadline = time.monotonic() + timeout
            shared.work.notify_all()
        self._reader.close(timeout)
        # One write may be on its way when time is up. The lock must not go before it has ended.
        if self._writer.join(timeout + 10):
            self._folder.close()

    def _complete(self, node: int, segment: Blob | None, checkpoint: Blob | None) -> None:
        new = [b for b in (segment, checkpoint) if b is not None]
        if self._accepts(new):
            self._shared.catalogue.complete(node, segment, checkpoint)
            self._enqueue(new)
        else:
            self._shared.catalogue.complete(node, None, None)
            self._enqueue([])

    def _enqueue(self, new: list[Blob]) -> None:
        self._shared.queue.extend(new)
        self._shared.backlog += sum(b.size for b in new)
        self._shared.ask()

    def _has(self, parent: int) -> bool:
        return parent == 0 or parent in self._shared.catalogue.nodes

    def _queued(self, payload: Payload | None, length: int, *, late: bool) -> Blob | None:
        if payload is None:
            return None
        return self._shared.catalogue.blob(payload, files.head(payload), length, late=late)

    def _accepts(self, new: list[Blob]) -> bool:
        shared = self._shared
        room = shared.backlog + sum(b.size for b in new) <= self._largest_backlog
        return shared.writable and shared.deadline is None and (room or not new)
