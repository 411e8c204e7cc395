"""A store without arrays: it knows of every token's state which prefix it is the state of.

Carries out the index's operations on plain lists, strictly: whatever is not there, twice there or in
the wrong order is an error. Its disk answers when it is told to, and forgets when it is told to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from millrace.cache.index import PrefixIndex, Restored
from millrace.cache.observations import (
    AnyObservation,
    DiskUsage,
    GoneFromDisk,
    ReadFromDisk,
    ReadNode,
    StoredOnDisk,
)
from millrace.cache.operations import (
    AnyOperation,
    Clear,
    Discard,
    Evict,
    EvictState,
    Fill,
    ForgetDisk,
    Keep,
    KeepState,
    Merge,
    NodeWant,
    Operation,
    ReadDisk,
    Restore,
    Source,
    Split,
    SplitDisk,
    TouchDisk,
    WriteDisk,
    WriteState,
)
from millrace.cache.planner import Layers
from millrace.cache.sizes import StateSizes, Window

SHAPES: dict[str, tuple[Layers, StateSizes]] = {
    "cuttable": (Layers(False), StateSizes(100)),
    "recurrent": (Layers(True), StateSizes(0, 70)),
    "hybrid": (Layers(True), StateSizes(100, 70)),
    "window": (Layers(True, 6), StateSizes(100, 0, (Window(10, 6),))),
    "pages": (Layers(False), StateSizes(100, page=4)),
    "pages beside states": (Layers(True), StateSizes(100, 70, page=4)),
}
JOB = Source("prefill", 1)

State = tuple[str, tuple[int, ...]]
"""A salt and the tokens up to and with the one whose state it is."""


def states(salt: str, tokens: list[int], start: int, end: int) -> list[State]:
    return [(salt, tuple(tokens[: i + 1])) for i in range(start, end)]


@dataclass
class OnDisk:
    parent: int
    salt: str
    tokens: list[int]
    segment: list[State] | None
    checkpoint: State | None


@dataclass
class PlainStore:
    sizes: StateSizes
    segments: dict[int, list[State]] = field(default_factory=dict)
    own: dict[int, bool] = field(default_factory=dict)
    """Whether the page in which a segment begins is not the one in which the one before it ends."""
    checkpoints: dict[int, State] = field(default_factory=dict)
    disk: dict[int, OnDisk] = field(default_factory=dict)
    reads: dict[int, tuple[NodeWant, ...]] = field(default_factory=dict)
    arrived: dict[int, dict[int, tuple[list[State] | None, State | None]]] = field(
        default_factory=dict
    )
    events: list[AnyObservation] = field(default_factory=list)
    written: int = 0

    @property
    def nbytes(self) -> int:
        runs = 0
        for node, run in self.segments.items():
            if run:
                end = len(run[-1][1])
                runs += self.sizes.segment(end - len(run), end, own=self.own.get(node, True))
        return runs + sum(self.sizes.checkpoint(len(c[1])) for c in self.checkpoints.values())

    def execute(
        self, operations: list[Operation], salt: str = "", tokens: list[int] | None = None
    ) -> tuple[list[State], State | None] | None:
        """All of them, as they come out of an encoder; what the last Restore made."""
        made = None
        raw = msgspec.msgpack.encode(operations)
        for operation in msgspec.msgpack.decode(raw, type=list[AnyOperation]):
            made = self._execute(operation, salt, tokens or []) or made
        return made

    def _execute(self, operation: Operation, salt: str, tokens: list[int]) -> Any:
        match operation:
            case Keep(node=node, start=start, end=end):
                assert node not in self.segments and start < end <= len(tokens)
                self.segments[node] = states(salt, tokens, start, end)
                self.own[node] = True
            case KeepState(node=node):
                assert node not in self.checkpoints
                self.checkpoints[node] = (salt, tuple(tokens))
            case Split(node=node, at=at, upper=upper):
                whole = self.segments[node]
                assert 0 < at < len(whole) and upper not in self.segments
                self.segments[upper], self.segments[node] = whole[:at], whole[at:]
                self.own[upper], self.own[node] = self.own.get(node, True), False
            case Merge(upper=upper, lower=lower, into=into):
                assert upper not in self.checkpoints and into not in self.segments
                assert upper not in self.disk and lower not in self.disk and into not in self.disk
                first, middle = (len(self.segments[n][0][1]) - 1 for n in (upper, lower))
                self.segments[into] = self.segments.pop(upper) + self.segments.pop(lower)
                own = [self.own.get(n, True) for n in (upper, lower)]
                self.own[into] = self.sizes.joined_own(first, middle, upper=own[0], lower=own[1])
                if lower in self.checkpoints:
                    self.checkpoints[into] = self.checkpoints.pop(lower)
            case Evict(node=node):
                del self.segments[node]
            case EvictState(node=node):
                del self.checkpoints[node]
            case Restore(at=at, nodes=nodes, holder=holder, holder_at=holder_at):
                found = [s for n in nodes for s in self.segments[n]]
                checkpoint = self.checkpoints[holder] if holder else None
                assert checkpoint is None or len(checkpoint[1]) == holder_at >= at
                return found[:at], checkpoint
            case Fill(ticket=ticket, node=node, segment=segment, checkpoint=checkpoint):
                run, end = self.arrived[ticket][node]
                if segment:
                    assert run is not None and node not in self.segments
                    begin = len(run[0][1]) - 1
                    assert begin == operation.start
                    assert not begin or operation.parent in self.segments
                    self.segments[node] = run
                    self.own[node] = True
                if checkpoint:
                    assert end is not None and node not in self.checkpoints
                    self.checkpoints[node] = end
            case Discard(ticket=ticket):
                del self.arrived[ticket]
            case Clear():
                self.segments.clear()
                self.checkpoints.clear()
                self.disk.clear()
            case ReadDisk(ticket=ticket, wants=wants):
                assert wants
                self.reads[ticket] = wants
            case WriteDisk():
                self._write(operation)
            case WriteState(node=node):
                if node in self.disk:
                    self.disk[node].checkpoint = self.checkpoints[node]
                    self.events.append(StoredOnDisk(node, True))
                else:
                    self.events.append(GoneFromDisk((node,)))
            case SplitDisk(node=node, at=at, upper=upper):
                self._split(node, at, upper)
            case ForgetDisk(nodes=nodes):
                for node in nodes:
                    self.drop(node, named=nodes)
            case TouchDisk():
                pass
            case _:
                raise TypeError(operation)
        return None

    def _write(self, write: WriteDisk) -> None:
        assert write.segment == bool(self.sizes.per_token)
        if write.parent and write.parent not in self.disk:
            self.events.append(GoneFromDisk((write.node,)))
            return
        assert write.node not in self.disk
        segment = self.segments[write.node] if write.segment else None
        checkpoint = self.checkpoints[write.node] if write.checkpoint else None
        self.disk[write.node] = OnDisk(
            write.parent, write.salt, list(write.tokens), segment, checkpoint
        )
        self.written += self.sizes.per_token * len(write.tokens)
        self.events.append(StoredOnDisk(write.node, write.checkpoint))

    def _split(self, node: int, at: int, upper: int) -> None:
        if node not in self.disk:
            self.events.append(GoneFromDisk((upper,)))
            return
        old = self.disk[node]
        run = old.segment
        self.disk[upper] = OnDisk(old.parent, old.salt, old.tokens[:at], run and run[:at], None)
        old.parent, old.tokens, old.segment = upper, old.tokens[at:], run and run[at:]

    def drop(self, node: int, named: tuple[int, ...] = ()) -> None:
        """A node leaves the disk with all below it, by itself or because the index said so."""
        if node not in self.disk:
            return
        gone, todo = [], [node]
        while todo:
            at = todo.pop()
            gone.append(at)
            todo += [id for id, n in self.disk.items() if n.parent == at]
        for id in gone:
            del self.disk[id]
        told = tuple(id for id in reversed(gone) if id not in named)
        if told:
            self.events.append(GoneFromDisk(told))

    def finish_reads(self, fails: bool = False) -> None:
        for ticket, wants in self.reads.items():
            read: dict[int, tuple[list[State] | None, State | None]] = {}
            failed = []
            for want in wants:
                there = self.disk.get(want.node)
                if (
                    fails
                    or there is None
                    or (want.segment and there.segment is None)
                    or (want.checkpoint and there.checkpoint is None)
                ):
                    failed.append(want.node)
                else:
                    read[want.node] = (
                        there.segment if want.segment else None,
                        there.checkpoint if want.checkpoint else None,
                    )
            self.arrived[ticket] = read
            nodes = [ReadNode(n, len(s or ()), c is not None) for n, (s, c) in read.items()]
            self.events.append(ReadFromDisk(ticket, tuple(nodes), tuple(failed)))
        self.reads.clear()

    def take_events(self) -> list[AnyObservation]:
        events, self.events = self.events, []
        return [*events, DiskUsage(self.written, 0)]


class Whole:
    """An index and a plain store, kept together."""

    def __init__(self, shape: str, memory: int, disk: int | None = None) -> None:
        self.needs, self.sizes = SHAPES[shape]
        self.index = PrefixIndex(self.needs, self.sizes, memory, disk_budget=disk)
        self.store = PlainStore(self.sizes)
        self.now = 0.0

    def keep(self, salt: str, tokens: list[int], **how: Any) -> int:
        out: list[Operation] = []
        how = {"state": True, "boundary": True, "now": self.now, **how}
        kept = self.index.keep(out, JOB, salt, tokens, **how)
        self.store.execute(out, salt, tokens)
        return kept

    def fetch(self, salt: str, tokens: list[int]) -> int | None:
        out: list[Operation] = []
        ticket = self.index.fetch(out, salt, tokens)
        self.store.execute(out)
        return ticket

    def restore(self, salt: str, tokens: list[int], ticket: int | None = None) -> Restored | None:
        out: list[Operation] = []
        found = self.index.restore(out, 1, salt, tokens, ticket, self.now)
        made = self.store.execute(out)
        assert (made is None) == (found is None)
        if made is not None and found is not None:
            run, checkpoint = made
            assert 0 < found.at < len(tokens)
            if self.sizes.per_token:
                assert run == states(salt, tokens, 0, found.at)
            self._check_end(salt, tokens, found.at, checkpoint)
        return found

    def _check_end(self, salt: str, tokens: list[int], at: int, end: State | None) -> None:
        assert (end is not None) == self.needs.uncut
        if end is not None:
            assert end[0] == salt and list(end[1][:at]) == tokens[:at]
            window = self.needs.window
            assert len(end[1]) == at or (window is not None and len(end[1]) < window)

    def hear(self) -> None:
        for event in self.store.take_events():
            out: list[Operation] = []
            self.index.observe(out, event, self.now)
            self.store.execute(out)

    def lend(self, nbytes: int) -> None:
        out: list[Operation] = []
        self.index.lend(out, nbytes, self.now)
        self.store.execute(out)

    def tick(self, idle: bool) -> float | None:
        out: list[Operation] = []
        again = self.index.tick(out, self.now, idle=idle)
        self.store.execute(out)
        return again

    def check(self) -> None:
        self.index.check()
        assert self.index.state_bytes == self.store.nbytes
        nodes = {n.id: n for n in self.index.nodes}
        assert self.store.segments.keys() <= nodes.keys() >= self.store.checkpoints.keys()
        for id, run in self.store.segments.items():
            node = nodes[id]
            line = [t for n in node.line() for t in n.tokens]
            assert run == states(node.salt, line, node.start, node.end)
        for id, end in self.store.checkpoints.items():
            line = [t for n in nodes[id].line() for t in n.tokens]
            assert end == (nodes[id].salt, tuple(line))
