"""The prefix cache as the engine uses it: find state, keep state, and stay within the budgets.

Every token's state is computed once and stored once. What is found is restored exactly to the token,
with one token always left to run. Runs on the engine's thread; the disk tier has threads of its own,
and is told and heard here without waiting.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from millrace.cache.disk import DiskTier, Dropped, PayloadsRead, Stored, Trouble
from millrace.cache.planner import RestorePlan, plan
from millrace.cache.policy import Part, victims
from millrace.cache.state import (
    KVSegment,
    Layout,
    StateCheckpoint,
    checkpoint_from,
    checkpoint_payload,
    restore,
    segment_from,
    segment_payload,
)
from millrace.cache.tree import Match, Node, Tree
from millrace.protocol import CacheReport, HitKind, TierReport

log = logging.getLogger("millrace.cache")

WRITE_AFTER = 1.0
"""Seconds after its making that state goes to disk, if it is not needed there earlier."""
WRITE_BUSY = 10.0
"""The same while rows are running."""
WRITE_AHEAD = 64 << 20
"""Bytes that may be on their way to the disk before less urgent writes wait."""

KVNode = Node[KVSegment, StateCheckpoint]


class StateSource(Protocol):
    """Whose state is to be kept: a row by itself, or one of a batch."""

    def segment(self, start: int, end: int, pack: bool) -> KVSegment: ...

    def checkpoint(self) -> StateCheckpoint: ...


@dataclass
class Restored:
    caches: list[Any]
    at: int
    hit: HitKind


class Ticket:
    """State on its way from the disk."""

    def __init__(self, nodes: list[KVNode]) -> None:
        self.nodes = nodes
        self.done = False
        self.tokens = 0
        """Tokens whose state was read."""


class PrefixCache:
    def __init__(
        self,
        model: Any,
        layout: Layout,
        memory: int,
        disk: DiskTier | None = None,
        *,
        pack: bool = False,
        problem: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._layout = layout
        self._memory = memory
        self._disk = disk
        self._pack = pack
        self._clock = clock
        self._tree: Tree[KVSegment, StateCheckpoint] = Tree(self._on_split)
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 1
        self._unwritten: dict[int, float] = {}
        """When nodes that the disk does not have were made."""
        self._problem = problem
        self._hits: Counter[HitKind] = Counter()
        self._saved = {"memory": 0, "disk": 0}
        self._found = {"memory": 0, "disk": 0}
        self._evicted = 0
        if disk is not None:
            self._warm(disk)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    @property
    def disk_bytes(self) -> int:
        return self._disk.bytes if self._disk else 0

    def known(self, salt: str, tokens: Sequence[int]) -> int:
        """How many tokens could be restored now, from memory or disk."""
        return self._plan(salt, tokens, memory_only=False)[1].at

    def fetch(self, salt: str, tokens: Sequence[int]) -> Ticket | None:
        """Begin to read what a prompt needs from disk; None if nothing is worth waiting for."""
        if self._disk is None:
            return None
        found, best = self._plan(salt, tokens, memory_only=False)
        if best.at <= self._plan(salt, tokens, memory_only=True)[1].at:
            return None
        path = [n for n in found.nodes if n.start < best.at]
        holder = self._holder(found, best)
        nodes = path if holder is None or holder in path else [*path, holder]
        wants = [
            (n.id, n in path and n.segment is None, n is holder and n.checkpoint is None)
            for n in nodes
        ]
        ticket = Ticket(nodes)
        for node in nodes:
            node.pins += 1
        self._tickets[self._next_ticket] = ticket
        self._disk.read(self._next_ticket, [w for w in wants if w[1] or w[2]])
        self._next_ticket += 1
        return ticket

    def restore(
        self, salt: str, tokens: Sequence[int], ticket: Ticket | None = None
    ) -> Restored | None:
        """The caches of a row that has the longest known prefix behind it."""
        found, best = self._plan(salt, tokens, memory_only=True)
        if not best.at:
            self._hits["none"] += 1
            return None
        now = self._clock()
        path = [n for n in found.nodes if n.start < best.at]
        for node in path:
            node.used = now
        holder = self._holder(found, best)
        if holder is not None:
            holder.used = now
        if self._disk is not None:
            self._disk.touch([n.id for n in path if n.stored])
        caches = restore(
            self._model,
            self._layout,
            best.at,
            [n.segment for n in path if n.segment is not None],
            holder.checkpoint if holder else None,
            best.checkpoint,
        )
        read = min(ticket.tokens, best.at) if ticket else 0
        hit = self._kind(found, best, len(tokens), read)
        self._count(hit, best.at, read)
        return Restored(caches, best.at, hit)

    def keep(
        self, salt: str, tokens: Sequence[int], source: StateSource, *, state: bool, boundary: bool
    ) -> int:
        """Keep the state after `tokens`; returns how many of them were not known before.

        `state` asks for a checkpoint where the model has layers that cannot be cut.
        """
        if not tokens:
            return 0
        now = self._clock()
        found = self._tree.match(salt, tokens)
        for node in found.nodes:
            node.pins += 1
        try:
            segment = None
            if found.length < len(tokens):
                segment = source.segment(found.length, len(tokens), self._pack)
                if not self._make_room(segment.nbytes + 8 * (len(tokens) - found.length)):
                    return 0
            node = self._tree.insert(salt, tokens, lambda *_: _given(segment), now)
        finally:
            for pinned in found.nodes:
                pinned.pins -= 1
        if segment is not None:
            mx.async_eval(segment.arrays)
            self._unwritten[node.id] = now
        if state and self._layout.rest and not node.has_checkpoint:
            self._keep_checkpoint(node, source, boundary, now)
        node.boundary |= boundary
        return len(tokens) - found.length

    def _keep_checkpoint(
        self, node: KVNode, source: StateSource, boundary: bool, now: float
    ) -> None:
        checkpoint = source.checkpoint()
        node.pins += 1
        if self._make_room(checkpoint.nbytes):
            self._tree.set_checkpoint(node, checkpoint, boundary)
            self._unwritten[node.id] = now
        node.pins -= 1

    def tick(self, *, idle: bool) -> float | None:
        """Hear the disk, hand it what is due. Returns in how many seconds to call again."""
        if self._disk is None:
            return None
        for event in self._disk.poll():
            match event:
                case PayloadsRead():
                    self._loaded(event)
                case Stored(node=id, checkpoint=checkpoint):
                    if node := self._tree.nodes.get(id):
                        node.checkpoint_stored = checkpoint
                case Dropped(nodes=ids):
                    self._dropped(ids)
                case Trouble(message=text):
                    log.warning("%s", text)
                    self._problem = text
        now = self._clock()
        wait = WRITE_AFTER if idle else WRITE_BUSY
        due = [id for id, created in self._unwritten.items() if now - created >= wait]
        for id in due:
            if self._disk.backlog > WRITE_AHEAD:
                return 0.05
            self._write_line(id)
        return WRITE_AFTER / 2 if self._unwritten else None

    @property
    def loading(self) -> bool:
        return bool(self._tickets)

    def clear(self) -> None:
        """Forget everything, in memory and on disk."""
        self._tree.clear()
        self._unwritten.clear()
        for ticket in self._tickets.values():
            ticket.done = True
        self._tickets.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self, timeout: float) -> None:
        """Write what the disk does not have, as long as time allows."""
        if self._disk is None:
            return
        for id in list(self._unwritten):
            self._write_line(id)
        self._disk.close(timeout)

    def report(self, id: str) -> CacheReport:
        nodes = list(self._tree.nodes.values())
        held = [n for n in nodes if n.segment is not None]
        memory = TierReport(
            budget=self._memory,
            bytes=self._tree.nbytes,
            entries=len(held),
            tokens=sum(len(n.tokens) for n in held),
            hits=self._found["memory"],
            tokens_saved=self._saved["memory"],
            evicted_bytes=self._evicted,
        )
        disk = None
        if self._disk is not None or self._problem is not None:
            stored = [n for n in nodes if n.stored]
            disk = TierReport(
                budget=self._disk.budget if self._disk else 0,
                bytes=self.disk_bytes,
                entries=len(stored),
                tokens=sum(len(n.tokens) for n in stored),
                hits=self._found["disk"],
                tokens_saved=self._saved["disk"],
                error=self._problem,
            )
        return CacheReport(id, True, memory, disk, dict(self._hits))

    def check(self) -> None:
        self._tree.check()
        assert self._tree.nbytes <= self._memory

    # What is known

    def _plan(
        self, salt: str, tokens: Sequence[int], *, memory_only: bool
    ) -> tuple[Match[KVSegment, StateCheckpoint], RestorePlan]:
        found = self._tree.match(salt, tokens[:-1])
        if memory_only:
            found = _in_memory(found)
        passed = [n.end for n in found.nodes if n.end <= found.length and _has(n, memory_only)]
        ahead: list[int] = []
        window = self._layout.needs.window
        if window is not None and found.nodes and found.length < window:
            last = found.nodes[-1]
            ahead = [n.end for n in last.below() if n.end < window and _has(n, memory_only)]
        limit = len(tokens) - 1
        return found, plan(self._layout.needs, found.length, limit, passed, ahead)

    def _holder(self, found: Match[KVSegment, StateCheckpoint], best: RestorePlan) -> KVNode | None:
        """The node with the plan's checkpoint."""
        if best.checkpoint is None:
            return None
        line = [n for n in found.nodes if n.end == best.checkpoint and n.has_checkpoint]
        if line:
            return line[0]
        below = found.nodes[-1].below()
        return next(n for n in below if n.end == best.checkpoint and n.has_checkpoint)

    def _kind(
        self, found: Match[KVSegment, StateCheckpoint], best: RestorePlan, length: int, read: int
    ) -> HitKind:
        if read:
            return "disk"
        if best.at == length - 1:
            return "exact"
        return "prefix" if best.at == min(found.length, length - 1) else "checkpoint"

    def _count(self, hit: HitKind, at: int, read: int) -> None:
        self._hits[hit] += 1
        self._saved["disk"] += read
        self._saved["memory"] += at - read
        self._found["disk" if read else "memory"] += 1

    # What is given up

    def _make_room(self, needed: int) -> bool:
        if needed > self._memory:
            return False
        excess = self._tree.nbytes + needed - self._memory
        if excess > 0:
            # A little more at once: choosing looks at every node.
            excess += self._memory // 50
            chosen = list(victims(self._tree.nodes.values(), self._clock(), excess))
            for node, part in chosen:
                if node.id in self._tree.nodes:
                    self._give_up(node, part)
        return self._tree.nbytes + needed <= self._memory

    def _give_up(self, node: KVNode, part: Part) -> None:
        before = self._tree.nbytes
        if self._disk is not None and self._may_write():
            self._write_line(node.id)
        if part == "checkpoint":
            self._tree.drop_checkpoint(node)
        elif node.stored:
            self._tree.drop_segment(node)
        elif not any(n.pins for n in node.below()):
            self._forget(node)
        self._evicted += before - self._tree.nbytes

    def _forget(self, node: KVNode) -> None:
        gone = self._tree.remove(node)
        for each in gone:
            self._unwritten.pop(each.id, None)
        if self._disk is not None:
            self._disk.forget([n.id for n in gone if n.stored or n.checkpoint_stored])

    # The disk

    def _warm(self, disk: DiskTier) -> None:
        """The tree as the disk knows it, without the state itself."""
        now = self._clock()
        for stored in disk.nodes():
            parent = (
                self._tree.nodes.get(stored.parent)
                if stored.parent
                else self._tree.root(stored.salt)
            )
            if parent is None or stored.tokens[0] in parent.children:
                disk.forget([stored.id])
                continue
            age = max(0.0, time.time() - stored.used)
            node = self._tree.attach(parent, stored.tokens, None, now - age, id=stored.id)
            node.stored = True
            node.checkpoint_stored = stored.checkpoint is not None
            node.boundary = node.checkpoint_stored
            if not self._layout.cuttable:
                self._tree.fill(node, KVSegment([], len(node.tokens)))

    def _on_split(self, node: KVNode, upper: KVNode) -> None:
        if node.stored and self._disk is not None:
            self._disk.split(node.id, len(upper.tokens), upper.id)
        elif node.id in self._unwritten:
            self._unwritten[upper.id] = self._unwritten[node.id]

    def _may_write(self) -> bool:
        return self._disk is not None and self._disk.backlog <= 4 * WRITE_AHEAD

    def _write_line(self, id: int) -> None:
        """Hand a node to the disk, and before it those that it builds on."""
        node = self._tree.nodes.get(id)
        if node is None or self._disk is None:
            self._unwritten.pop(id, None)
            return
        for each in node.line():
            created = self._unwritten.pop(each.id, None)
            if created is not None or not each.stored:
                self._write(each)

    def _write(self, node: KVNode) -> None:
        assert self._disk is not None
        checkpoint = None
        if node.checkpoint is not None and not node.checkpoint_stored:
            checkpoint = checkpoint_payload(node.checkpoint)
            node.checkpoint_stored = True
        if node.stored:
            if checkpoint is not None:
                self._disk.put_checkpoint(node.id, checkpoint)
            return
        assert node.segment is not None and node.parent is not None
        segment = segment_payload(node.segment) if self._layout.cuttable else None
        salt = self._tree.salt_of(node)
        self._disk.put(node.id, node.parent.id, salt, node.tokens, segment, checkpoint)
        node.stored = True

    def _loaded(self, event: PayloadsRead) -> None:
        ticket = self._tickets.pop(event.ticket, None)
        if ticket is None:
            return
        for id, (segment, checkpoint) in (event.payloads or {}).items():
            node = self._tree.nodes.get(id)
            if node is None:
                continue
            if segment is not None and node.segment is None:
                read = segment_from(segment)
                if read.length == len(node.tokens) and self._make_room(read.nbytes):
                    self._tree.fill(node, read)
                    ticket.tokens += read.length
            if checkpoint is not None and node.checkpoint is None:
                state = checkpoint_from(checkpoint)
                if self._make_room(state.nbytes):
                    self._tree.set_checkpoint(node, state, node.boundary)
                    ticket.tokens = max(ticket.tokens, node.end)
        for node in ticket.nodes:
            node.pins -= 1
        if self._disk is not None:
            self._disk.forget(event.failed)
        self._dropped(event.failed)
        ticket.done = True

    def _dropped(self, ids: Sequence[int]) -> None:
        """The disk no longer has these."""
        for id in ids:
            node = self._tree.nodes.get(id)
            if node is None:
                continue
            node.stored = node.checkpoint_stored = False
            if node.segment is None and not any(n.pins for n in node.below()):
                self._forget(node)


def _given(segment: KVSegment | None) -> KVSegment:
    assert segment is not None
    return segment


def _has(node: KVNode, memory_only: bool) -> bool:
    return node.checkpoint is not None if memory_only else node.has_checkpoint


def _in_memory(found: Match[KVSegment, StateCheckpoint]) -> Match[KVSegment, StateCheckpoint]:
    """The part of a match whose segments are in memory without a gap."""
    for i, node in enumerate(found.nodes):
        if node.segment is None:
            return Match(found.nodes[:i], min(found.length, node.start))
    return found
