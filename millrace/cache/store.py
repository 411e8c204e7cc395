"""The prefix cache's body: the state of the index's nodes in memory, and the disk tier behind it.

It carries out what the index decided, in order, and decides nothing. What the disk says becomes plain
observations for the index; the arrays that came with it wait here until the index takes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from millrace.cache.disk import DiskTier, Dropped, PayloadsRead, Stored, Trouble
from millrace.cache.observations import (
    AnyObservation,
    DiskTrouble,
    DiskUsage,
    FoundOnDisk,
    GoneFromDisk,
    LostState,
    ReadFromDisk,
    ReadNode,
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
    Merge,
    Operation,
    ReadDisk,
    Restore,
    Split,
    SplitDisk,
    TouchDisk,
    WriteDisk,
    WriteState,
)
from millrace.cache.payload import Payload
from millrace.cache.segments import CopiedSegments, Segments, StateSource
from millrace.cache.state import (
    Layout,
    RestoredState,
    StateCheckpoint,
    checkpoint_from,
    checkpoint_payload,
    restore_checkpoint,
)

log = logging.getLogger("millrace.cache")

_CLOSING_BACKLOG = 128 << 20
"""Bytes that wait to be written before closing waits with the next."""


class StateLost(Exception):
    """The state of a node that is to be restored was never kept."""


class SegmentStore:
    def __init__(
        self,
        make_caches: Callable[[], list[Any]],
        layout: Layout,
        disk: DiskTier | None = None,
        segments: Segments[Any] | None = None,
    ) -> None:
        """`make_caches` gives the empty caches of a single row; `segments` are copies if left out."""
        self._make_caches = make_caches
        self._layout = layout
        self._disk = disk
        self._how: Segments[Any] = segments or CopiedSegments()
        self._segments: dict[int, Any] = {}
        self._checkpoints: dict[int, StateCheckpoint] = {}
        self._read: dict[int, dict[int, tuple[Payload | None, Payload | None]]] = {}
        """What came from the disk, by ticket and node."""
        self._usage: DiskUsage | None = None
        self._lost: set[int] = set()
        self._lost_states: set[int] = set()
        """Nodes whose segment or checkpoint was decided to be kept, and is not here."""
        self._unseen: list[AnyObservation] = []

    @property
    def nbytes(self) -> int:
        """Memory held; equals the index's `state_bytes` once all operations are carried out."""
        segments = sum(int(s.nbytes) for s in self._segments.values())
        return segments + sum(c.nbytes for c in self._checkpoints.values())

    def state(self) -> object:
        """What is in memory, as plain values: nodes with the lengths of their segments, and checkpoints."""
        lengths = sorted((node, s.length) for node, s in self._segments.items())
        return lengths, sorted(self._checkpoints)

    def found(self) -> list[FoundOnDisk]:
        """What the disk has at the start, parents before children."""
        now = time.time()
        return [
            FoundOnDisk(
                n.id,
                n.parent,
                n.salt,
                tuple(n.tokens),
                n.checkpoint is not None,
                max(0.0, now - n.used),
            )
            for n in (self._disk.nodes() if self._disk else ())
        ]

    def forget_others(self, known: Collection[int]) -> None:
        """Of what the disk has, keep these nodes only."""
        if self._disk is not None:
            self._disk.forget([n.id for n in self._disk.nodes() if n.id not in known])

    def poll(self) -> list[AnyObservation]:
        """What has happened on the disk since the last call, in order."""
        seen, self._unseen = self._unseen, []
        if self._disk is None:
            return seen
        seen += [self._observed(event) for event in self._disk.poll()]
        usage = DiskUsage(self._disk.bytes, self._disk.backlog)
        if usage != self._usage:
            self._usage = usage
            seen.append(usage)
        return seen

    def execute(
        self, operation: Operation, source: StateSource | None = None
    ) -> RestoredState | None:
        """Carry out one operation. Keep and KeepState need the source; Restore returns the state
        of the prefill."""
        match operation:
            case Keep(node=node, start=start, end=end):
                assert source is not None
                self._segments[node] = self._how.keep(source, start, end)
            case KeepState(node=node):
                assert source is not None
                self._checkpoints[node] = source.checkpoint()
            case Split(node=node, at=at, upper=upper):
                if node in self._lost:
                    self._lose((upper,))
                # Where no layer can be cut, nodes found on disk have no segment.
                if (whole := self._segments.get(node)) is not None:
                    self._segments[upper], self._segments[node] = self._how.cut(whole, at)
            case Merge(upper=upper, lower=lower, into=into):
                self._merge(upper, lower, into)
            case Evict(node=node):
                self._release(self._segments.pop(node, None))
                self._lost.discard(node)
            case EvictState(node=node):
                if node not in self._lost_states:
                    del self._checkpoints[node]
                self._lost_states.discard(node)
            case Restore():
                return self._restored(operation)
            case Fill():
                self._fill(operation)
            case Discard(ticket=ticket):
                self._read.pop(ticket, None)
            case Clear():
                for segment in self._segments.values():
                    self._release(segment)
                for kept in (self._segments, self._checkpoints, self._lost, self._lost_states):
                    kept.clear()
                if self._disk is not None:
                    self._disk.clear()
            case _:
                self._execute_on_disk(operation)
        return None

    def lose(self, operation: Keep | KeepState) -> None:
        """Instead of `execute`, where the source has failed: the index hears what it has not."""
        if isinstance(operation, Keep):
            self._lose((operation.node,))
        else:
            self._lose((), (operation.node,))

    def close(self, writes: Iterable[Operation], timeout: float) -> None:
        """Carry out the last writes as long as time allows, then close the disk."""
        if self._disk is None:
            return
        deadline = time.monotonic() + timeout
        for operation in writes:
            while self._disk.backlog > _CLOSING_BACKLOG and time.monotonic() < deadline:
                time.sleep(0.01)
            if time.monotonic() >= deadline:
                break
            self.execute(operation)
        self._disk.close(max(0.0, deadline - time.monotonic()))

    def _execute_on_disk(self, operation: Operation) -> None:
        disk = self._disk
        assert disk is not None, operation
        match operation:
            case ReadDisk(ticket=ticket, wants=wants):
                disk.read(ticket, [(w.node, w.segment, w.checkpoint) for w in wants])
            case WriteDisk(node=node, parent=parent, salt=salt, tokens=tokens):
                if node in self._lost:
                    self._unseen.append(GoneFromDisk((node,)))
                    return
                segment = self._how.payload(self._segments[node]) if operation.segment else None
                checkpoint = self._payload(node) if operation.checkpoint else None
                disk.put(node, parent, salt, tokens, segment, checkpoint)
            case WriteState(node=node):
                if (payload := self._payload(node)) is not None:
                    disk.put_checkpoint(node, payload)
            case SplitDisk(node=node, at=at, upper=upper):
                disk.split(node, at, upper)
            case ForgetDisk(nodes=nodes):
                disk.forget(nodes)
            case TouchDisk(nodes=nodes):
                disk.touch(nodes)
            case _:
                raise TypeError(f"{operation} is not an operation of the prefix cache")

    def _payload(self, node: int) -> Payload | None:
        if node in self._lost_states:
            return None
        return checkpoint_payload(self._checkpoints[node])

    def _lose(self, nodes: tuple[int, ...], checkpoints: tuple[int, ...] = ()) -> None:
        self._lost.update(nodes)
        self._lost_states.update(checkpoints)
        self._unseen.append(LostState(nodes, checkpoints))

    def _merge(self, upper: int, lower: int, into: int) -> None:
        pair = [self._segments.pop(node, None) for node in (upper, lower)]
        parts = [segment for segment in pair if segment is not None]
        if {upper, lower} & self._lost:
            self._lost -= {upper, lower}
            for part in parts:
                self._release(part)
            self._lose((into,))
        elif len(parts) == 2:
            self._segments[into] = self._how.join(*parts)
        if lower in self._lost_states:
            self._lost_states.discard(lower)
            self._lose((), (into,))
        checkpoint = self._checkpoints.pop(lower, None)
        if checkpoint is not None:
            self._checkpoints[into] = checkpoint

    def _release(self, segment: Any) -> None:
        if segment is not None:
            self._how.release(segment)

    def _restored(self, operation: Restore) -> RestoredState:
        if self._lost.intersection(operation.nodes) or operation.holder in self._lost_states:
            raise StateLost(f"the state of {operation} was never kept")
        at, caches, pages = operation.at, self._make_caches(), None
        if self._layout.cuttable:
            found = [self._segments[node] for node in operation.nodes]
            pages = self._how.restore(caches, self._layout, found, at)
        if self._layout.rest:
            holder = self._checkpoints[operation.holder]
            restore_checkpoint(caches, self._layout, holder, operation.holder_at, at)
        return RestoredState(caches, pages)

    def _fill(self, operation: Fill) -> None:
        segment, checkpoint = self._read[operation.ticket][operation.node]
        if operation.segment:
            assert segment is not None
            # Where no layer can be cut, a segment is no more than a place.
            parent = self._segments.get(operation.parent)
            self._segments[operation.node] = self._how.load(segment, operation.start, parent)
        if operation.checkpoint:
            assert checkpoint is not None
            self._checkpoints[operation.node] = checkpoint_from(checkpoint)

    def _observed(self, event: PayloadsRead | Stored | Dropped | Trouble) -> AnyObservation:
        match event:
            case PayloadsRead(ticket=ticket, payloads=payloads, failed=failed):
                self._read[ticket] = payloads or {}
                nodes = [
                    ReadNode(node, _length(segment), checkpoint is not None)
                    for node, (segment, checkpoint) in self._read[ticket].items()
                ]
                return ReadFromDisk(ticket, tuple(nodes), tuple(failed))
            case Stored(node=node, checkpoint=checkpoint):
                return StoredOnDisk(node, checkpoint)
            case Dropped(nodes=ids):
                return GoneFromDisk(tuple(ids))
            case Trouble(message=text, off=off):
                log.warning("%s", text)
                return DiskTrouble(text, off)


def _length(segment: Payload | None) -> int:
    """Tokens of a segment as it lies on disk."""
    array = next(iter(segment.arrays.values()), None) if segment else None
    return 0 if array is None else array.shape[2]
