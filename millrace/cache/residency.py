"""What stays in memory and in which pieces: room is made, nodes are cut, merged and forgotten.

Pure: it changes the tree and appends to the caller's list the operations that make the store follow.
"""

from __future__ import annotations

from millrace.cache import merging
from millrace.cache.eviction import Part, victims
from millrace.cache.operations import (
    Evict,
    EvictState,
    ForgetDisk,
    Merge,
    Operation,
    Split,
    SplitDisk,
)
from millrace.cache.radix import TOKEN_BYTES, Node, RadixTree
from millrace.cache.writeback import WriteBack

Operations = list[Operation]


class Residency:
    def __init__(self, tree: RadixTree, write_back: WriteBack, memory: int) -> None:
        self._tree = tree
        self._write_back = write_back
        self.memory = memory
        """Bytes that may be held."""
        self._loose: dict[int, None] = {}
        """Nodes of which something changed that may let them be merged."""
        self.evicted = 0
        """Bytes that have left the memory."""

    def cut(self, out: Operations, node: Node, at: int) -> Node:
        """Make a node's first `at` tokens one of their own; returns that."""
        upper = self._tree.cut(node, at)
        if node.resident:
            out.append(Split(node.id, at, upper.id))
        if node.stored:
            out.append(SplitDisk(node.id, at, upper.id))
        self._write_back.cut(node, upper)
        self.loosen(upper)
        self.loosen(node)
        return upper

    def loosen(self, node: Node) -> None:
        """Look at a node and its parent in the next `merge`."""
        self._loose[node.id] = None
        if node.parent is not None and node.parent.parent is not None:
            self._loose[node.parent.id] = None

    def merge(self, out: Operations, now: float) -> None:
        """Make one of two wherever that has become possible."""
        while self._loose:
            upper = self._tree.nodes.get(self._loose.popitem()[0])
            lower = merging.partner(upper) if upper else None
            if upper is None or lower is None:
                continue
            if stored := tuple(n.id for n in (upper, lower) if n.stored):
                out.append(ForgetDisk(stored))
            into = self._tree.merge(upper, lower)
            out.append(Merge(upper.id, lower.id, into.id))
            self._write_back.merged(upper, lower, into, now)
            self.loosen(into)

    def make_room(self, out: Operations, needed: int, now: float) -> bool:
        """Whether so many bytes are free, after giving up what is worth least."""
        if needed > self.memory:
            return False
        self._free(out, needed, now)
        return self._tree.nbytes + needed <= self.memory

    def resize(self, out: Operations, memory: int, now: float) -> None:
        """Hold no more than so many bytes from now on. What is read from disk just now stays until it
        has come."""
        self.memory = memory
        self._free(out, 0, now)

    def _free(self, out: Operations, needed: int, now: float) -> None:
        if self._tree.nbytes + needed <= self.memory:
            return
        # A little more at once: choosing looks at every node.
        excess = self._tree.nbytes + needed - self.memory + self.memory // 50
        most = self._tree.nbytes - excess
        progress = True
        while progress and self._tree.nbytes > most:
            # Again, where a run goes to disk: what its tokens take stays.
            progress = False
            for node, part in list(victims(self._tree, now, self._tree.nbytes - most)):
                if self._tree.nbytes <= most:
                    break  # a run that is forgotten takes its checkpoint with it
                if node.id in self._tree.nodes:
                    progress |= self.give_up(out, node, part, now)

    def give_up(self, out: Operations, node: Node, part: Part, now: float) -> bool:
        """Let go of a part of a node in memory; says whether that could be."""
        before = self._tree.nbytes
        self._write_back.save(out, node, now)
        if part == "checkpoint":
            self._tree.set_checkpoint(node, False)
            out.append(EvictState(node.id))
            self.loosen(node)
        elif node.stored:
            self._tree.set_resident(node, False)
            out.append(Evict(node.id))
        elif not any(n.pins for n in node.below()):
            self.forget(out, node)
        else:
            return False
        self.evicted += before - self._tree.nbytes
        return True

    def forget(self, out: Operations, node: Node) -> None:
        """Let go of a node and all under it, in memory and on disk."""
        if node.parent is not None:
            self.loosen(node.parent)
        gone = self._tree.remove(node)
        for each in gone:
            self._write_back.forget(each.id)
            if each.resident:
                out.append(Evict(each.id))
            if each.checkpoint:
                out.append(EvictState(each.id))
        if stored := tuple(n.id for n in gone if n.stored):
            out.append(ForgetDisk(stored))

    def bury(self, out: Operations, node: Node) -> None:
        """Forget a node whose state is nowhere, as soon as nobody waits for it."""
        if not node.resident and not node.stored and not any(n.pins for n in node.below()):
            self.forget(out, node)

    def clear(self) -> None:
        self._loose.clear()

    def check(self) -> None:
        nodes = self._tree.nodes.values()
        reading = any(n.pins for n in nodes)
        # The tokens of what has gone to disk stay known.
        known = TOKEN_BYTES * sum(len(n.tokens) for n in nodes)
        held = self._tree.nbytes
        assert reading or held <= max(self.memory, known), (held, self.memory, known)
        for node in nodes:
            assert merging.partner(node) is None, f"node {node.id} should have been merged"
