"""The prefix cache's mind: what is known, what is found, kept, given up, read and written.

Pure. It sees token ids, sizes, the clock's readings that callers hand in and what the store observed
of the disk, and appends operations to the caller's list; it never sees an array, a file or a thread.
The store (`store.SegmentStore`) carries the operations out in the order they were decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from millrace.cache.disk_view import DiskView
from millrace.cache.lookup import PrefixLookup, look_up
from millrace.cache.observations import (
    AnyObservation,
)
from millrace.cache.operations import (
    Clear,
    Keep,
    KeepState,
    Restore,
    Source,
    TouchDisk,
)
from millrace.cache.planner import Layers
from millrace.cache.radix import TOKEN_BYTES, Match, Node, RadixTree
from millrace.cache.residency import Operations, Residency
from millrace.cache.sizes import StateSizes
from millrace.cache.writeback import WriteBack
from millrace.protocol.prefixes import CacheChange, CacheReport, HitKind, TierReport

SHARE = 2
"""One prompt may have this part of the memory: half of it."""


@dataclass(frozen=True)
class Restored:
    at: int
    """Tokens that need not be run."""
    hit: HitKind


class PrefixIndex:
    def __init__(
        self,
        needs: Layers,
        sizes: StateSizes,
        memory: int,
        *,
        disk_budget: int | None = None,
        problem: str | None = None,
        told: bool = False,
    ) -> None:
        """`memory` is what it may hold in any case; more is lent by `lend`. Without a `disk_budget` there
        is no disk; `problem` says why, if one was asked for.

        `told` has it note what becomes of the tree, for `changes`.
        """
        self._needs = needs
        self._floor = memory
        self._tree = RadixTree(sizes)
        self._tree.changes = [] if told else None
        self._sizes = sizes
        self._per_token = sizes.per_token + TOKEN_BYTES
        self._write_back = WriteBack(self._tree, disk_budget is not None)
        self._residency = Residency(self._tree, self._write_back, memory)
        self._disk_budget = disk_budget
        self._disk = DiskView(self._tree, sizes, self._residency, self._write_back, problem)
        self._hits: Counter[HitKind] = Counter()
        self._saved = {"memory": 0, "disk": 0}
        self._found = {"memory": 0, "disk": 0}

    @property
    def nbytes(self) -> int:
        """Memory that is held: state, and eight bytes for each token."""
        return self._tree.nbytes

    @property
    def state_bytes(self) -> int:
        """What of that the store holds."""
        return self._tree.nbytes - TOKEN_BYTES * sum(len(n.tokens) for n in self.nodes)

    @property
    def memory(self) -> int:
        """Bytes that it may hold in any case."""
        return self._floor

    def lend(self, out: Operations, nbytes: int, now: float) -> None:
        """Let it hold so many bytes more from now on. What is beyond them is given up."""
        self._residency.resize(out, self._floor + nbytes, now)
        self._residency.merge(out, now)

    @property
    def sizes(self) -> StateSizes:
        return self._sizes

    @property
    def nodes(self) -> list[Node]:
        return list(self._tree.nodes.values())

    @property
    def disk_bytes(self) -> int:
        return self._disk.nbytes

    @property
    def loading(self) -> bool:
        """State is on its way from the disk."""
        return self._disk.loading

    def waits(self, ticket: int | None) -> bool:
        """Whether what was asked for with the ticket is still on its way."""
        return self._disk.waits(ticket)

    def known(self, salt: str, tokens: Sequence[int]) -> int:
        """How many tokens could be restored now, from memory or disk."""
        return self._look_up(salt, tokens, memory_only=False).at

    def fetch(self, out: Operations, salt: str, tokens: Sequence[int]) -> int | None:
        """Begin to read what a prompt needs from disk; None if nothing is worth waiting for."""
        if self._disk_budget is None:
            return None
        best = self._look_up(salt, tokens, memory_only=False)
        if best.at <= self._look_up(salt, tokens, memory_only=True).at:
            return None
        return self._disk.read(out, best)

    def abandon(self, ticket: int | None) -> None:
        """Nobody will restore with the ticket any more; what is read stays."""
        self._disk.abandon(ticket)

    def restore(
        self,
        out: Operations,
        prefill: int,
        salt: str,
        tokens: Sequence[int],
        ticket: int | None,
        now: float,
    ) -> Restored | None:
        """Give a prefill the longest prefix that is in memory, one token always left to run."""
        read = self._disk.tokens(ticket)
        self._disk.abandon(ticket)
        best = self._look_up(salt, tokens, memory_only=True)
        if not best.at:
            self._hits["none"] += 1
            return None
        path, holder = best.path, best.holder
        for node in path:
            node.used = now
            node.shared = max(node.shared, min(best.at, node.end) - node.start)
        if holder is not None:
            holder.used = now
        if stored := tuple(n.id for n in path if n.stored):
            out.append(TouchDisk(stored))
        ids = tuple(n.id for n in path)
        out.append(Restore(prefill, best.at, ids, *((holder.id, holder.end) if holder else (0, 0))))
        read = min(read, best.at)
        hit = _kind(best, len(tokens), read)
        self._hits[hit] += 1
        self._saved["disk"] += read
        self._saved["memory"] += best.at - read
        self._found["disk" if read else "memory"] += 1
        return Restored(best.at, hit)

    def keep(
        self,
        out: Operations,
        source: Source,
        salt: str,
        tokens: Sequence[int],
        *,
        state: bool,
        boundary: bool,
        now: float,
        owner: int = 0,
    ) -> int:
        """Keep the source's state after `tokens`; returns how many of them are newly kept.

        `state` asks for a checkpoint where the model has layers that cannot be cut, at a `boundary`
        (the end of a message, a prompt, an answer) or on the way. `owner` is the request's number,
        if the caller can tell: what a second one keeps as well is worth writing to disk.
        """
        found = self._tree.match(salt, tokens)
        for node in found.nodes:
            node.used = now
            if owner and node.owner and owner != node.owner:
                node.shared = max(node.shared, min(found.length, node.end) - node.start)
        new = len(tokens) - found.length
        at_end = found.nodes[-1] if found.nodes and not (new or found.partial) else None
        wanted = bool(tokens) and state and self._needs.uncut
        wanted = wanted and not (at_end is not None and at_end.has_checkpoint)
        if at_end is not None:
            at_end.boundary |= boundary
        if not new and not wanted:
            return 0
        with self._pinned(found.nodes):
            count, wanted = self._room_for(out, found, len(tokens), wanted, boundary, now)
            if count or wanted:
                known = tokens[: found.length + count]
                node = self._grow(out, source, salt, known, found, now)
                node.owner = node.owner or owner
                node.boundary |= boundary and node.end == len(tokens)
                if wanted:
                    self._tree.set_checkpoint(node, True)
                    out.append(KeepState(node.id, source))
                    self._write_back.made(node, now)
                self._residency.loosen(node)
        self._residency.merge(out, now)
        return count

    def tick(self, out: Operations, now: float, *, idle: bool) -> float | None:
        """Hand the disk what is due. Returns in how many seconds to call again."""
        return self._write_back.tick(out, now, idle=idle)

    def observe(self, out: Operations, event: AnyObservation, now: float) -> None:
        """Learn what the store has seen of the disk."""
        self._disk.observe(out, event, now)
        self._residency.merge(out, now)

    def changes(self) -> list[CacheChange]:
        """What became of the tree since this was last asked, where it is noted."""
        found = self._tree.changes
        if not found:
            return []
        self._tree.changes = []
        return found

    def clear(self, out: Operations) -> None:
        """Forget everything, in memory and on disk."""
        self._tree.clear()
        self._residency.clear()
        self._write_back.clear()
        self._disk.clear()
        out.append(Clear())

    def close(self, out: Operations, now: float) -> None:
        """Write what the disk does not have, what is worth most first; time may cut that short."""
        self._write_back.close(out, now, self._disk_budget or 0)

    def report(self, id: str) -> CacheReport:
        nodes = self.nodes
        held = [n for n in nodes if n.resident]
        memory = TierReport(
            budget=self._residency.memory,
            bytes=self._tree.nbytes,
            entries=len(held),
            tokens=sum(len(n.tokens) for n in held),
            hits=self._found["memory"],
            tokens_saved=self._saved["memory"],
            evicted_bytes=self._residency.evicted,
        )
        disk = None
        if self._disk_budget is not None or self._disk.problem is not None:
            stored = [n for n in nodes if n.stored]
            disk = TierReport(
                budget=self._disk_budget or 0,
                bytes=self.disk_bytes,
                entries=len(stored),
                tokens=sum(len(n.tokens) for n in stored),
                hits=self._found["disk"],
                tokens_saved=self._saved["disk"],
                error=self._disk.problem,
            )
        return CacheReport(id, True, memory, disk, dict(self._hits))

    def check(self) -> None:
        """Every invariant; for tests and idle moments."""
        self._tree.check()
        self._write_back.check()
        self._residency.check()
        self._disk.check()

    @property
    def _share(self) -> int:
        """What one prompt may have."""
        return self._residency.memory // SHARE

    def _look_up(self, salt: str, tokens: Sequence[int], *, memory_only: bool) -> PrefixLookup:
        limit = len(tokens) - 1
        if not memory_only:
            # No more comes back from disk for one prompt than it may have.
            limit = min(limit, self._share // self._per_token)
        return look_up(self._tree, self._needs, salt, tokens, limit, memory_only=memory_only)

    def _room_for(
        self, out: Operations, found: Match, length: int, state: bool, boundary: bool, now: float
    ) -> tuple[int, bool]:
        """How many tokens after those found may be kept of a prompt, and whether the checkpoint
        after them may: within the prompt's share, whose head is worth most, and in the memory."""
        new = length - found.length
        checkpoint = self._sizes.checkpoint(length) if state else 0
        held = [n for n in found.nodes if n.checkpoint and n.end <= found.length]
        line = self._per_token * found.length + sum(map(self._tree.checkpoint_bytes, held))
        for node in held if state and boundary else ():
            # The end of a message is worth more than a place on the way there.
            if line + self._per_token * new + checkpoint <= self._share:
                break
            if not node.boundary and node.pins == 1:
                line -= self._tree.checkpoint_bytes(node)
                self._residency.give_up(out, node, "checkpoint", now)
        room = self._share - line - checkpoint
        count = self._sizes.fitting(found.length, new, max(0, room), TOKEN_BYTES)
        if room < 0 or (self._needs.uncut and count < new):
            # Without the checkpoint after it, such a run is of no use.
            return 0, False
        size = self._sizes.segment(found.length, found.length + count) + TOKEN_BYTES * count
        if not self._residency.make_room(out, (size if count else 0) + checkpoint, now):
            return 0, False
        return count, state

    def _grow(
        self,
        out: Operations,
        source: Source,
        salt: str,
        tokens: Sequence[int],
        found: Match,
        now: float,
    ) -> Node:
        """Make `tokens` known to the end, where a node then ends."""
        at = found.nodes[-1] if found.nodes else None
        if at is not None and found.partial:
            # Two prompts part here, or one came here again: this far it was used twice.
            at.shared = max(at.shared, found.length - at.start)
            at = self._residency.cut(out, at, found.length - at.start)
        if at is not None and found.length == len(tokens):
            return at
        node = self._tree.attach(salt, at, list(tokens[found.length :]))
        assert node is not None
        node.used = now
        self._tree.set_resident(node, True)
        out.append(Keep(node.id, source, found.length, len(tokens)))
        self._write_back.made(node, now)
        return node

    @contextmanager
    def _pinned(self, nodes: list[Node]) -> Iterator[None]:
        for node in nodes:
            node.pins += 1
        try:
            yield
        finally:
            for node in nodes:
                node.pins -= 1


def _kind(best: PrefixLookup, length: int, read: int) -> HitKind:
    if read:
        return "disk"
    if best.at == length - 1:
        return "exact"
    return "prefix" if best.at == min(best.match.length, length - 1) else "checkpoint"
