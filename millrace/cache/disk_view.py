"""What the index knows of the disk and of what the store lost: entered into the tree as it is told.

It owns the tickets of prompts that wait for state from disk. What is worth keeping, reading or writing
it does not decide, and it never sees a file. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.cache.lookup import PrefixLookup
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
    Discard,
    Evict,
    EvictState,
    Fill,
    ForgetDisk,
    NodeWant,
    ReadDisk,
)
from millrace.cache.radix import Node, RadixTree
from millrace.cache.residency import Operations, Residency
from millrace.cache.sizes import StateSizes
from millrace.cache.writeback import WriteBack


@dataclass
class _Ticket:
    nodes: list[Node]
    loading: bool = True
    abandoned: bool = False
    tokens: int = 0
    """Tokens whose state was read."""


class DiskView:
    def __init__(
        self,
        tree: RadixTree,
        sizes: StateSizes,
        residency: Residency,
        write_back: WriteBack,
        problem: str | None,
    ) -> None:
        self._tree = tree
        self._sizes = sizes
        self._residency = residency
        self._write_back = write_back
        self._tickets: dict[int, _Ticket] = {}
        self._next_ticket = 1
        self.problem = problem
        """What a person should know of it."""
        self.nbytes = 0

    @property
    def loading(self) -> bool:
        """State is on its way."""
        return any(ticket.loading for ticket in self._tickets.values())

    def waits(self, ticket: int | None) -> bool:
        """Whether what was asked for with the ticket is still on its way."""
        return ticket in self._tickets and self._tickets[ticket].loading

    def read(self, out: Operations, found: PrefixLookup) -> int:
        """Begin to read what of it is not in memory; returns the ticket."""
        path, holder = found.path, found.holder
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

    def tokens(self, ticket: int | None) -> int:
        """Tokens whose state was read with the ticket."""
        return self._tickets[ticket].tokens if ticket in self._tickets else 0

    def abandon(self, ticket: int | None) -> None:
        """Nobody will restore with the ticket any more; what is read stays."""
        if ticket in self._tickets:
            self._tickets[ticket].abandoned = True
            if not self._tickets[ticket].loading:
                del self._tickets[ticket]

    def observe(self, out: Operations, event: AnyObservation, now: float) -> None:
        match event:
            case FoundOnDisk():
                self._found(out, event, now)
            case ReadFromDisk():
                self._loaded(out, event, now)
            case StoredOnDisk(node=id, checkpoint=checkpoint):
                if (node := self._tree.nodes.get(id)) and node.stored:
                    node.checkpoint_stored = checkpoint
                    self._residency.loosen(node)
            case GoneFromDisk(nodes=ids):
                self._dropped(out, ids)
            case DiskTrouble(message=text, off=off):
                self.problem = text
                if off:
                    self._write_back.off()
            case DiskUsage(nbytes=nbytes, backlog=backlog):
                self.nbytes = nbytes
                self._write_back.backlog = backlog
            case LostState(nodes=ids, checkpoints=states):
                self._lost(out, ids, states)

    def clear(self) -> None:
        self._tickets.clear()

    def check(self) -> None:
        pins: Counter[int] = Counter()
        for ticket in self._tickets.values():
            if ticket.loading:
                pins.update(n.id for n in ticket.nodes if n.id in self._tree.nodes)
        for node in self._tree.nodes.values():
            assert node.pins == pins[node.id], "only tickets pin"

    def _found(self, out: Operations, found: FoundOnDisk, now: float) -> None:
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
            parent = node.parent
            assert parent is not None
            # A node that was cut since has another length, and one with a hole before it is of no use.
            segment = read.tokens == count and not node.resident
            segment = segment and (parent.parent is None or parent.resident)
            size = self._sizes.segment(node.start, node.end)
            segment = segment and self._residency.make_room(out, size, now)
            # Making room may have taken the parent's.
            segment = segment and (parent.parent is None or parent.resident)
            if segment:
                node.own_page = True
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
                out.append(Fill(event.ticket, node.id, segment, checkpoint, node.start, parent.id))
        out.append(Discard(event.ticket))
        if ticket is not None:
            self._arrived(out, event.ticket, ticket)
            # There may be less memory than when it was asked for.
            self._residency.make_room(out, 0, now)
        if event.failed:
            # All below goes with them. What is not named here is reported later, when it may have been
            # written again.
            tops = [self._tree.nodes[id] for id in event.failed if id in self._tree.nodes]
            below = {n.id for top in tops for n in top.below() if n.stored}
            out.append(ForgetDisk((*event.failed, *sorted(below - set(event.failed)))))
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
