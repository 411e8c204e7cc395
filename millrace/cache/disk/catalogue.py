"""The tree as it is on disk or soon will be, in memory: nodes, the files they use, what changed.

The truth for reading and for eviction; the index on disk follows it. Pure data without locks or
input and output: whoever uses it holds the lock.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Mapping, Sequence

from millrace.cache.disk.budget import Candidate, File, plan
from millrace.cache.disk.events import Stored, StoredNode
from millrace.cache.disk.files import on_disk
from millrace.cache.disk.records import Blob, Changes, DiskNode, FileRef, IndexRow
from millrace.cache.payload import Payload

_OLDEST = 512


class DiskCatalogue:
    def __init__(self) -> None:
        self.nodes: dict[int, DiskNode] = {}
        self.next_file = 1
        self.trash: list[Blob] = []
        """Written files without a user."""
        self.loose: set[Blob] = set()
        """Files that lost a user and have others."""
        self._changed: set[int] = set()
        self._touched: set[int] = set()
        self._gone: set[int] = set()
        self._wipe = False
        self._taken = Changes()

    def load(self, rows: Iterable[IndexRow], sizes: Mapping[int, int]) -> set[int]:
        """Take the index's rows, given the files that are there; rows that do not fit go, with
        all below them. Returns the files that have not the size they were written with."""
        damaged: set[int] = set()
        blobs: dict[int, Blob] = {}
        below: dict[int, list[IndexRow]] = {}
        for row in rows:
            self._gone.add(row.id)
            refs = [r for r in (row.segment, row.checkpoint) if r]
            damaged |= {r.id for r in refs if sizes.get(r.id, r.size) != r.size}
            if _fits(row, sizes):
                below.setdefault(row.parent, []).append(row)
        frontier = [0]
        while frontier:
            for row in below.pop(frontier.pop(), ()):
                refs = [r for r in (row.segment, row.checkpoint) if r]
                for ref in refs:
                    blobs.setdefault(ref.id, _found(ref))
                if any(blobs[ref.id].ref != ref for ref in refs):
                    continue
                node = DiskNode(row.id, row.parent, row.salt, row.tokens, row.used, row=True)
                node.lo, node.hi = row.lo, row.hi
                node.segment = blobs[row.segment.id] if row.segment else None
                node.checkpoint = blobs[row.checkpoint.id] if row.checkpoint else None
                self._attach(node)
                self._gone.discard(node.id)
                frontier.append(node.id)
        self.next_file = max([*sizes, *blobs, 0]) + 1
        return damaged

    def blob(self, payload: Payload, head: bytes, length: int, *, late: bool = False) -> Blob:
        size = len(head) + payload.nbytes
        blob = Blob(self.next_file, size, length, payload, head, late=late)
        self.next_file += 1
        return blob

    def add(
        self,
        id: int,
        parent: int,
        salt: str,
        tokens: Sequence[int],
        segment: Blob | None,
        checkpoint: Blob | None,
        used: float,
    ) -> None:
        node = DiskNode(id, parent, salt, array("q", tokens), used, segment, checkpoint=checkpoint)
        node.hi = len(tokens) if segment else 0
        node.announce = True
        self._attach(node)
        self._changed.add(id)

    def complete(self, id: int, segment: Blob | None, checkpoint: Blob | None) -> None:
        """Give a node what it did not have; without anything, only say again what it has."""
        node = self.nodes[id]
        node.announce = node.announce or (segment is None and checkpoint is None)
        if segment is not None:
            node.segment, node.lo, node.hi = segment, 0, len(node.tokens)
            segment.users.add(id)
        if checkpoint is not None:
            node.checkpoint = checkpoint
            checkpoint.users.add(id)
        self._changed.add(id)

    def split(self, id: int, at: int, upper: int) -> None:
        node = self.nodes[id]
        first = DiskNode(upper, node.parent, node.salt, node.tokens[:at], node.used, node.segment)
        if node.segment:
            first.lo, first.hi = node.lo, node.lo + at
            node.lo += at
        first.announce = True
        node.tokens = node.tokens[at:]
        siblings = self.nodes.get(node.parent)
        if siblings:
            siblings.children.discard(id)
        node.parent = upper
        self._attach(first)
        first.children.add(id)
        self._changed |= {id, upper}

    def touch(self, ids: Iterable[int], now: float) -> None:
        for id in ids:
            node = self.nodes.get(id)
            if node is not None:
                node.used = now
                self._touched.add(id)

    def drop(self, ids: Iterable[int]) -> list[int]:
        """Remove nodes with all below them; returns them, children before parents."""
        order: list[int] = []
        for id in ids:
            if id in self.nodes:
                order += self._remove(id)
        return order

    def clear(self) -> None:
        self.drop([n.id for n in self.nodes.values() if not n.parent])
        self._wipe = True
        self._changed.clear()
        self._touched.clear()
        self._gone.clear()

    def withdraw(self, blob: Blob) -> list[int]:
        """A file that could not be written. Returns the nodes that go with it."""
        if not blob.late:
            return self.drop(list(blob.users))
        for id in blob.users:
            node = self.nodes[id]
            if node.segment is blob:
                node.segment, node.lo, node.hi = None, 0, 0
            if node.checkpoint is blob:
                node.checkpoint = None
            node.announce = True
            self._changed.add(id)
        blob.users.clear()
        return []

    def written(self, blob: Blob, crc: int) -> None:
        blob.crc, blob.written, blob.payload, blob.head = crc, True, None, b""
        self._changed |= blob.users
        for id in blob.users:
            self.nodes[id].announce = True

    def replace(self, old: Blob, new: Blob) -> None:
        """Let the users of a file use another one with the same first positions."""
        for id in old.users:
            self.nodes[id].segment = new
        new.users |= old.users
        self._changed |= old.users
        old.users.clear()

    def take_loose(self, least: int) -> list[tuple[Blob, int]]:
        """The files that could do without their second half, of at least so many bytes, and the
        length of the first."""
        found = []
        for blob in self.loose:
            used = max((self.nodes[id].hi for id in blob.users), default=blob.length)
            unused = blob.length - used
            if (
                blob.written
                and 2 * used <= blob.length
                and blob.size * unused >= least * blob.length
            ):
                found.append((blob, used))
        self.loose.clear()
        return found

    def take_trash(self) -> list[Blob]:
        """The files to delete now; those still being read stay for a later turn."""
        ready = [b for b in self.trash if not b.readers]
        self.trash = [b for b in self.trash if b.readers]
        return ready

    def take_changes(self) -> Changes:
        """What the index has to learn; in hand until `learned` or `keep_changes`."""
        self.keep_changes()
        rows = self.rows(id for id in self._changed if self._ready(id))
        written = {row.id for row in rows}
        used = [(i, self.nodes[i].used) for i in self._touched - written if i in self.nodes]
        self._taken = Changes(self._wipe, sorted(self._gone), rows, used)
        self._changed = {i for i in self._changed if i in self.nodes} - written
        self._wipe, self._gone, self._touched = False, set(), set()
        return self._taken

    def keep_changes(self) -> None:
        """The index did not learn what was taken."""
        taken, self._taken = self._taken, Changes()
        self._wipe |= taken.wipe
        self._gone |= set(taken.gone)
        self._changed |= {row.id for row in taken.rows if row.id in self.nodes}
        self._touched |= {id for id, _ in taken.used}

    def learned(self) -> list[Stored]:
        """The index has what was taken. Returns what there is to tell of it."""
        taken, self._taken = self._taken, Changes()
        stored = []
        for row in taken.rows:
            node = self.nodes.get(row.id)
            if node is None:
                self._gone.add(row.id)
                continue
            node.row = True
            if node.announce and node.id not in self._changed:
                node.announce = False
                stored.append(Stored(node.id, row.segment is not None, row.checkpoint is not None))
        return stored

    def change_all(self) -> None:
        """The index has lost everything."""
        self._gone.clear()
        self._changed |= set(self.nodes)

    def rows(self, ids: Iterable[int]) -> list[IndexRow]:
        return [self._row(self.nodes[id]) for id in ids]

    def unrecorded(self) -> list[int]:
        """Nodes whose files are written and whose row is not."""
        return [id for id in self._changed if self._ready(id) and not self.nodes[id].row]

    @property
    def waiting(self) -> bool:
        """There is a change to write, times of use aside."""
        return bool(self._wipe or self._gone or any(self._ready(id) for id in self._changed))

    def victims(self, need: int, spare: int, now: float) -> list[int]:
        """The nodes to drop for `need` bytes and up to `spare` more, children before parents."""
        leaves = [node for node in self.nodes.values() if not node.children]
        # A look at the oldest alone is quick, and nearly always enough.
        few = heapq.nsmallest(_OLDEST, leaves, key=lambda node: node.used)
        for some in (few, leaves):
            candidates = (self._candidate(node.id) for node in some)
            found = plan((c for c in candidates if c), self._candidate, need, spare, now)
            if found or len(leaves) <= _OLDEST:
                break
        return found

    def listed(self) -> list[StoredNode]:
        """All nodes that can be read from disk, parents before children."""
        found: list[StoredNode] = []
        frontier = [n for n in self.nodes.values() if not n.parent]
        while frontier:
            node = frontier.pop()
            frontier += [self.nodes[c] for c in node.children]
            row = self._row(node)
            if self._ready(node.id):
                segment, checkpoint = row.segment, row.checkpoint
                found.append(
                    StoredNode(
                        node.id,
                        node.parent,
                        node.salt,
                        node.tokens.tolist(),
                        segment.id if segment else None,
                        row.lo,
                        row.hi,
                        checkpoint.id if checkpoint else None,
                        node.used,
                    )
                )
        return found

    def _candidate(self, id: int) -> Candidate | None:
        """The node as eviction sees it; None while it is being written or read."""
        node = self.nodes.get(id)
        if node is None or not node.row:
            return None
        blobs = node.blobs
        if any(b.readers or not b.written for b in blobs):
            return None
        files = tuple(File(b.id, on_disk(b.size), len(b.users)) for b in blobs)
        return Candidate(id, node.parent, len(node.children), node.used, node.share, files)

    def _attach(self, node: DiskNode) -> None:
        self.nodes[node.id] = node
        for blob in node.blobs:
            blob.users.add(node.id)
        parent = self.nodes.get(node.parent)
        if parent:
            parent.children.add(node.id)

    def _remove(self, id: int) -> list[int]:
        order, frontier = [], [id]
        while frontier:
            at = frontier.pop()
            order.append(at)
            frontier += self.nodes[at].children
        order.reverse()
        for at in order:
            node = self.nodes.pop(at)
            parent = self.nodes.get(node.parent)
            if parent:
                parent.children.discard(at)
            if node.row:
                self._gone.add(at)
            for blob in node.blobs:
                blob.users.discard(at)
                if blob.users:
                    self.loose.add(blob)
                elif blob.written:
                    self.trash.append(blob)
        return order

    def _ready(self, id: int) -> bool:
        """Whether the node's row may be written: its own files are there, and its parent's row."""
        node = self.nodes.get(id)
        while node is not None:
            if not all(b.written or b.late for b in node.blobs):
                return False
            if not node.parent:
                return True
            node = self.nodes[node.parent]
            if node.row:
                return True
        return False

    def _row(self, node: DiskNode) -> IndexRow:
        segment = node.segment if node.segment and node.segment.written else None
        checkpoint = node.checkpoint if node.checkpoint and node.checkpoint.written else None
        return IndexRow(
            node.id,
            node.parent,
            node.salt,
            node.tokens,
            segment.ref if segment else None,
            node.lo if segment else 0,
            node.hi if segment else 0,
            checkpoint.ref if checkpoint else None,
            node.used,
        )


def _fits(row: IndexRow, sizes: Mapping[int, int]) -> bool:
    if not row.tokens or not row.id:
        return False
    segment, checkpoint = row.segment, row.checkpoint
    if checkpoint and sizes.get(checkpoint.id) != checkpoint.size:
        return False
    return segment is None or (
        sizes.get(segment.id) == segment.size
        and 0 <= row.lo < row.hi <= segment.length
        and row.hi - row.lo == len(row.tokens)
    )


def _found(ref: FileRef) -> Blob:
    return Blob(ref.id, ref.size, ref.length, crc=ref.crc, written=True)
