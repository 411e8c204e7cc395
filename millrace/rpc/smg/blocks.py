"""The engine's prefix cache as gateways see one: blocks of 16 tokens, each named by all before it.

A copy of the cache's tree, kept from what the engine tells, whose runs have any length; a block is
there when the run that holds its last token is. Pure: no clock, no wire types.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millrace.protocol.prefixes import AllGone, CacheChange, RunCut, RunKept, RunsGone, RunsMerged

SIZE = 16
"""Tokens of a block."""
_NO_TOKEN = 1 << 31
"""What stands for a picture in the tree becomes a number from here on, which no vocabulary has."""


@dataclass(frozen=True)
class KvBlock:
    hash: int
    """Of its tokens and all before them, as a signed number of 64 bits."""
    tokens: Sequence[int]


@dataclass(frozen=True)
class StoredBlocks:
    """Blocks that follow each other, the first of them after `parent`."""

    parent: int | None
    blocks: Sequence[KvBlock]


@dataclass(frozen=True)
class Removed:
    hashes: Sequence[int]


@dataclass(frozen=True)
class Cleared:
    pass


BlockEvent = StoredBlocks | Removed | Cleared


@dataclass(eq=False)
class _Run:
    parent: int
    start: int
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)
    """Of the blocks whose last token is in the run."""
    children: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class KvBlocks:
    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self.count = 0
        """Blocks that are there."""

    def take(self, changes: Sequence[CacheChange]) -> list[BlockEvent]:
        """Follow the tree; returns what that means for blocks."""
        events: list[BlockEvent] = []
        for change in changes:
            match change:
                case RunKept(node=node, parent=parent, tokens=tokens):
                    events += self._kept(node, parent, tokens)
                case RunCut(node=node, at=at, upper=upper):
                    self._cut(node, at, upper)
                case RunsMerged(upper=upper, lower=lower, into=into):
                    self._merged(upper, lower, into)
                case RunsGone(nodes=nodes):
                    events += self._gone(nodes)
                case AllGone():
                    self._runs.clear()
                    self.count = 0
                    events.append(Cleared())
        return events

    def snapshot(self) -> Iterator[StoredBlocks]:
        """All that is there, parents before their children."""
        for run in sorted(self._runs.values(), key=lambda r: r.start):
            if run.hashes:
                yield StoredBlocks(self._before(run), self._blocks(run))

    def _kept(self, node: int, parent: int, tokens: list[int]) -> list[BlockEvent]:
        above = self._runs.get(parent)
        told = [t if 0 <= t < _NO_TOKEN else t % _NO_TOKEN + _NO_TOKEN for t in tokens]
        run = self._runs[node] = _Run(parent, above.end if above else 0, told)
        if above is not None:
            above.children.add(node)
        before = self._before(run)
        hash_ = before
        for words in self._cut_up(run):
            hash_ = _hash(hash_, words)
            run.hashes.append(hash_)
        self.count += len(run.hashes)
        return [StoredBlocks(before, self._blocks(run))] if run.hashes else []

    def _cut(self, node: int, at: int, upper: int) -> None:
        run = self._runs[node]
        middle = run.start + at
        count = middle // SIZE - run.start // SIZE
        self._runs[upper] = _Run(run.parent, run.start, run.tokens[:at], run.hashes[:count], {node})
        self._replace(run.parent, node, upper)
        run.parent, run.start = upper, middle
        run.tokens, run.hashes = run.tokens[at:], run.hashes[count:]

    def _merged(self, upper: int, lower: int, into: int) -> None:
        first, second = self._runs.pop(upper), self._runs.pop(lower)
        first.tokens += second.tokens
        first.hashes += second.hashes
        first.children = second.children
        for child in first.children:
            self._runs[child].parent = into
        self._runs[into] = first
        self._replace(first.parent, upper, into)

    def _replace(self, parent: int, child: int, other: int | None) -> None:
        """Have a parent's child be another, or none."""
        if (above := self._runs.get(parent)) is not None:
            above.children.discard(child)
            if other is not None:
                above.children.add(other)

    def _gone(self, nodes: Sequence[int]) -> list[BlockEvent]:
        hashes: list[int] = []
        for node in nodes:
            run = self._runs.pop(node)
            self._replace(run.parent, node, None)
            hashes += run.hashes
        self.count -= len(hashes)
        return [Removed(hashes)] if hashes else []

    def _before(self, run: _Run) -> int | None:
        """The last block that ended before the run."""
        at = self._runs.get(run.parent)
        while at is not None:
            if at.hashes:
                return at.hashes[-1]
            at = self._runs.get(at.parent)
        return None

    def _blocks(self, run: _Run) -> list[KvBlock]:
        return [KvBlock(h, t) for h, t in zip(run.hashes, self._cut_up(run), strict=True)]

    def _cut_up(self, run: _Run) -> list[list[int]]:
        """The tokens of each block that ends in the run."""
        known = [*self._tail(run.parent, run.start % SIZE), *run.tokens]
        return [known[i : i + SIZE] for i in range(0, len(known) - SIZE + 1, SIZE)]

    def _tail(self, node: int, count: int) -> list[int]:
        """The last tokens of a node's line."""
        found: list[int] = []
        while len(found) < count:
            run = self._runs[node]
            found = [*run.tokens[-(count - len(found)) :], *found]
            node = run.parent
        return found


def _hash(before: int | None, tokens: Sequence[int]) -> int:
    words = hashlib.blake2b(digest_size=8)
    words.update(struct.pack("<q", before or 0))
    words.update(struct.pack(f"<{len(tokens)}I", *tokens))
    return int.from_bytes(words.digest(), "little", signed=True)
