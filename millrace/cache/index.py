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

from millrace.cache.lookup import PrefixLookup, look_up
from millrace.cache.observations import (
    AnyObservation,
    DiskTrouble,
    DiskUsage,
    FoundOnDisk,
    GoneFromDisk,
    LostState,
    ReadFromDisk,
    StoredOnDisk,
)
from millrace.cache.operations import (
    Clear,
    Discard,
    Evict,
    EvictState,
    Fill,
    ForgetDisk,
    Keep,
    KeepState,
    NodeWant,
    ReadDisk,
    Restore,
    Source,
    TouchDisk,
)
from millrace.cache.planner import Layers
from millrace.cache.radix import TOKEN_BYTES, Match, Node, RadixTree
from millrace.cache.residency import Operations, Residency
from millrace.cache.sizes import StateSizes
from millrace.cache.writeback import WriteBack
from millrace.protocol import CacheReport, HitKind, TierReport

SHARE = 2
"""One prompt may have this part of the memory: half of it."""


@dataclass(frozen=True)
class Restored:
    at: int
    """Tokens that need not be run."""
    hit: HitKind


@dataclass
class _Ticket:
    nodes: list[Node]
    loading: bool = True
    abandoned: bool = False
    tokens: int = 0
    """Tokens whose state was read."""


class PrefixIndex:
    def __init__(
        self,
        needs: Layers,
        sizes: StateSizes,
        memory: int,
        *,
        disk_budget: int | None = None,
        problem: str | None = None,
    ) -> None:
        """Without a `disk_budget` there is no disk; `problem` says why, if one was asked for."""
        self._needs = needs
        self._memory = memory
        self._share = memory // SHARE
        self._tree = RadixTree(sizes)
        self._sizes = sizes
        self._per_token = sizes.per_token + TOKEN_BYTES
        self._write_back = WriteBack(self._tree, disk_budget is not None)
        self._residency = Residency(self._tree, self._write_back, memory)
        self._disk_budget = disk_budget
        self._problem = problem
        self._tickets: dict[int, _Ticket] = {}
        self._next_ticket = 1
        self._hits: Counter[HitKind] = Counter()
        self._saved = {"memory": 0, "disk": 0}
        self._found = {"memory": 0, "disk": 0}
        self.disk_bytes = 0

    @property
    def nbytes(self) -> int:
        """Memory that is held: state, and eight bytes for each token."""
        return self._tree.nbytes

    @property
    def state_bytes(self) -> int:
        """What of that the store holds."""
        return self._tree.nbytes - TOKEN_BYTES * sum(len(n.tokens) for n in self.nodes)

    @property
    def nodes(self) -> list[Node]:
        return list(self._tree.nodes.values())

    @property
    def loading(self) -> bool:
        """State is on its way from the disk."""
        return any(ticket.loading for ticket in self._tickets.values())

    def waits(self, ticket: int | None) -> bool:
        """Whether what was asked for with the ticket is still on its way."""
        return ticket in self._tickets and self._tickets[ticket].loading

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
        path, holder = best.path, best.holder
        nodes = path if holder is None or holder in path else [*path, holder]
        wants = [
            NodeWant(n.id, n in path and not n.resident, n is holder and not n.checkpoint)
            for n in nodes
        ]
        for node in nodes:
            node.pins += 1
        ticket = self._next_ticket
        self._next_ticket += 1
        self._tickets[ticket] = _Ticket(nodes)
        out.append(ReadDisk(ticket, tuple(w for w in wants if w.segment or w.checkpoint)))
        return ticket

    def abandon(self, ticket: int | None) -> None:
        """Nobody will restore with the ticket any more; what is read stays."""
        if ticket in self._tickets:
            self._tickets[ticket].abandoned = True
            if not self._tickets[ticket].loading:
                del self._tickets[ticket]

    def restore(
        self,
        out: Operations,
        job: int,
        salt: str,
        tokens: Sequence[int],
        ticket: int | None,
        now: float,
    ) -> Restored | None:
        """Give a prompt's job the longest prefix that is in memory, one token always left to run."""
        read = self._tickets[ticket].tokens if ticket in self._tickets else 0
        self.abandon(ticket)
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
        out.append(Restore(job, best.at, ids, *((holder.id, holder.end) if holder else (0, 0))))
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
        match event:
            case FoundOnDisk():
                self._warm(out, event, now)
            case ReadFromDisk():
                self._loaded(out, event, now)
            case StoredOnDisk(node=id, checkpoint=checkpoint):
                if (node := self._tree.nodes.get(id)) and node.stored:
                    node.checkpoint_stored = checkpoint
                    self._residency.loosen(node)
            case GoneFromDisk(nodes=ids):
                self._dropped(out, ids)
            case DiskTrouble(message=text, off=off):
                self._problem = text
                if off:
                    self._write_back.off()
            case DiskUsage(nbytes=nbytes, backlog=backlog):
                self.disk_bytes = nbytes
                self._write_back.backlog = backlog
            case LostState(nodes=ids, checkpoints=states):
                self._lost(out, ids, states)
        self._residency.merge(out, now)

    def clear(self, out: Operations) -> None:
        """Forget everything, in memory and on disk."""
        self._tree.clear()
        self._residency.clear()
        self._write_back.clear()
        self._tickets.clear()
        out.append(Clear())

    def close(self, out: Operations, now: float) -> None:
        """Write what the disk does not have, what is worth most first; time may cut that short."""
        self._write_back.close(out, now, self._disk_budget or 0)

    def report(self, id: str) -> CacheReport:
        nodes = self.nodes
        held = [n for n in nodes if n.resident]
        memory = TierReport(
            budget=self._memory,
            bytes=self._tree.nbytes,
            entries=len(held),
            tokens=sum(len(n.tokens) for n in held),
            hits=self._found["memory"],
            tokens_saved=self._saved["memory"],
            evicted_bytes=self._residency.evicted,
        )
        disk = None
        if self._disk_budget is not None or self._problem is not None:
            stored = [n for n in nodes if n.stored]
            disk = TierReport(
                budget=self._disk_budget or 0,
                bytes=self.disk_bytes,
                entries=len(stored),
                tokens=sum(len(n.tokens) for n in stored),
                hits=self._found["disk"],
                tokens_saved=self._saved["disk"],
                error=self._problem,
            )
        return CacheReport(id, True, memory, disk, dict(self._hits))

    def check(self) -> None:
        """Every invariant; for tests and idle moments."""
        self._tree.check()
        self._write_back.check()
        self._residency.check()
        pins: Counter[int] = Counter()
        for ticket in self._tickets.values():
            if ticket.loading:
                pins.update(n.id for n in ticket.nodes if n.id in self._tree.nodes)
        for node in self.nodes:
            assert node.pins == pins[node.id], "only tickets pin"

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
        count = max(0, min(new, room // self._per_token))
        if room < 0 or (self._needs.uncut and count < new):
            # Without the checkpoint after it, such a run is of no use.
            return 0, False
        if not self._residency.make_room(out, self._per_token * count + checkpoint, now):
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

    def _warm(self, out: Operations, found: FoundOnDisk, now: float) -> None:
        """Know what the disk knows, without the state itself."""
        parent = self._tree.nodes.get(found.parent)
        node = None
        if (parent is not None or not found.parent) and found.node > 0:
            node = self._tree.attach(found.salt, parent, list(found.tokens), found.node)
        if node is None:
            out.append(ForgetDisk((found.node,)))
            return
        node.used = now - max(0.0, found.age)
        node.stored = True
        node.checkpoint_stored = node.boundary = found.checkpoint
        node.resident = not self._sizes.per_token

    def _loaded(self, out: Operations, event: ReadFromDisk, now: float) -> None:
        ticket = self._tickets.get(event.ticket)
        for read in event.nodes if ticket else ():
            node = self._tree.nodes.get(read.node)
            if ticket is None or node is None:
                continue
            count = len(node.tokens)
            # A node that was cut since has another length.
            segment = read.tokens == count and not node.resident
            segment = segment and self._residency.make_room(out, self._sizes.segment(count), now)
            if segment:
                self._tree.set_resident(node, True)
                ticket.tokens += count
            checkpoint = read.checkpoint and not node.checkpoint
            checkpoint = checkpoint and self._residency.make_room(
                out, self._sizes.checkpoint(node.end), now
            )
            if checkpoint:
                self._tree.set_checkpoint(node, True)
                ticket.tokens = max(ticket.tokens, node.end)
            if segment or checkpoint:
                out.append(Fill(event.ticket, node.id, segment, checkpoint))
        out.append(Discard(event.ticket))
        if ticket is not None:
            self._arrived(out, event.ticket, ticket)
        if event.failed:
            out.append(ForgetDisk(event.failed))
            self._dropped(out, event.failed)

    def _arrived(self, out: Operations, number: int, ticket: _Ticket) -> None:
        """The reading has ended, well or not."""
        for node in ticket.nodes:
            node.pins -= 1
        # A node that was split meanwhile has another above it.
        for node in [above for waited in ticket.nodes for above in waited.line()]:
            if node.id in self._tree.nodes:
                self._residency.loosen(node)
                self._residency.bury(out, node)
        ticket.loading = False
        ticket.nodes = []
        if ticket.abandoned:
            del self._tickets[number]

    def _lost(self, out: Operations, ids: Sequence[int], states: Sequence[int]) -> None:
        """The store has not what was decided."""
        for id in states:
            node = self._tree.nodes.get(id)
            if node is not None and node.checkpoint:
                self._tree.set_checkpoint(node, False)
                out.append(EvictState(id))
                self._residency.loosen(node)
        for id in ids:
            node = self._tree.nodes.get(id)
            if node is not None and node.resident:
                self._tree.set_resident(node, False)
                out.append(Evict(id))
                self._dropped(out, (id,))

    def _dropped(self, out: Operations, ids: Sequence[int]) -> None:
        """The disk no longer has these, nor anything below them."""
        dropped = [self._tree.nodes[id] for id in ids if id in self._tree.nodes]
        for node in [below for top in dropped for below in top.below()]:
            node.stored = node.checkpoint_stored = False
            if node.id in self._tree.nodes:
                self._residency.loosen(node)
                self._residency.bury(out, node)

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
