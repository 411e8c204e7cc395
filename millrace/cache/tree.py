"""The tree of token runs: which prefixes are known, and what state belongs to them.

A radix tree per salt. An edge and the node it leads to are one object: a run of tokens with the state
of those tokens (a segment), and perhaps state at its end that cannot be cut (a checkpoint). What a
segment is made of, and when something is given up, is not decided here.

    root ── system prompt ──┬── question 1 ── answer 1 ── question 2
                            └── another question
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar


class Segment(Protocol):
    """The state of a run of tokens, which can be cut between any two of them."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, start: int, end: int) -> Self:
        """The part from token `start` to before `end`; shares no memory with the rest."""


class Checkpoint(Protocol):
    """State at one place that cannot be cut."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Segment)
C = TypeVar("C", bound=Checkpoint)

TOKEN_BYTES = 8
"""What a token itself costs in the tree; runs without state would be free otherwise."""


@dataclass(eq=False)
class Node(Generic[S, C]):
    id: int
    tokens: list[int]
    start: int
    parent: Node[S, C] | None
    segment: S | None = None
    """None while the state is on disk only."""
    checkpoint: C | None = None
    children: dict[int, Node[S, C]] = field(default_factory=dict)
    used: float = 0.0
    pins: int = 0
    """Somebody waits for this node: it may not be given up."""
    stored: bool = False
    """The segment is on disk."""
    checkpoint_stored: bool = False
    boundary: bool = False
    """The checkpoint is at the end of a message, a prompt or an answer, not just on the way."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Memory held, without that of the checkpoint."""
        return TOKEN_BYTES * len(self.tokens) + (self.segment.nbytes if self.segment else 0)

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint is not None or self.checkpoint_stored

    def line(self) -> list[Node[S, C]]:
        """The nodes from below the root to this one."""
        nodes: list[Node[S, C]] = []
        at: Node[S, C] | None = self
        while at is not None and at.parent is not None:
            nodes.append(at)
            at = at.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node[S, C]]:
        """This node and all under it, children after their parents."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())


@dataclass
class Match(Generic[S, C]):
    """How far a run of tokens is known: whole nodes, and perhaps a part of one more."""

    nodes: list[Node[S, C]]
    length: int

    @property
    def partial(self) -> bool:
        return bool(self.nodes) and self.length < self.nodes[-1].end


class Tree(Generic[S, C]):
    def __init__(self, on_split: Callable[[Node[S, C], Node[S, C]], None] | None = None) -> None:
        self._roots: dict[str, Node[S, C]] = {}
        self._on_split = on_split
        self._next_id = 1
        self.nbytes = 0
        self.nodes: dict[int, Node[S, C]] = {}

    def root(self, salt: str) -> Node[S, C]:
        if salt not in self._roots:
            self._roots[salt] = Node(0, [], 0, None)
        return self._roots[salt]

    def salt_of(self, node: Node[S, C]) -> str:
        top = node
        while top.parent is not None:
            top = top.parent
        return next(salt for salt, root in self._roots.items() if root is top)

    def match(self, salt: str, tokens: Sequence[int]) -> Match[S, C]:
        """The longest known prefix, to the token."""
        at = self._roots.get(salt)
        nodes: list[Node[S, C]] = []
        length = 0
        while at is not None and length < len(tokens):
            child = at.children.get(tokens[length])
            if child is None:
                break
            nodes.append(child)
            common = shared(child.tokens, tokens, length)
            length += common
            if common < len(child.tokens):
                break
            at = child
        return Match(nodes, length)

    def insert(
        self, salt: str, tokens: Sequence[int], read: Callable[[int, int], S], now: float
    ) -> Node[S, C]:
        """Make `tokens` known to the end; `read(start, end)` gives the state of what is not."""
        found = self.match(salt, tokens)
        at = found.nodes[-1] if found.nodes else self.root(salt)
        if found.partial:
            at = self.split(at, found.length - at.start)
        for node in at.line():
            node.used = now
        if found.length == len(tokens):
            return at
        segment = read(found.length, len(tokens))
        return self.attach(at, list(tokens[found.length :]), segment, now)

    def attach(
        self,
        parent: Node[S, C],
        tokens: list[int],
        segment: S | None,
        now: float,
        id: int | None = None,
    ) -> Node[S, C]:
        """Add a leaf. Its first token must be new under the parent."""
        assert tokens and tokens[0] not in parent.children
        if id is None:
            id = self._next_id
        self._next_id = max(self._next_id, id + 1)
        leaf = Node(id, tokens, parent.end, parent, segment, used=now)
        parent.children[tokens[0]] = leaf
        self.nodes[leaf.id] = leaf
        self.nbytes += leaf.nbytes
        return leaf

    def split(self, node: Node[S, C], at: int) -> Node[S, C]:
        """Make the first `at` tokens of a node a node of their own, above it; returns that."""
        assert 0 < at < len(node.tokens) and node.parent is not None
        parent = node.parent
        self.nbytes -= node.nbytes
        upper: Node[S, C] = Node(self._next_id, node.tokens[:at], node.start, parent)
        self._next_id += 1
        if node.segment is not None:
            upper.segment = node.segment.cut(0, at)
            node.segment = node.segment.cut(at, len(node.tokens))
        upper.used, upper.stored = node.used, node.stored
        parent.children[node.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.start += at
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self.nodes[upper.id] = upper
        self.nbytes += node.nbytes + upper.nbytes
        if self._on_split is not None:
            self._on_split(node, upper)
        return upper

    def set_checkpoint(self, node: Node[S, C], checkpoint: C, boundary: bool) -> None:
        self.drop_checkpoint(node)
        node.checkpoint = checkpoint
        node.boundary |= boundary
        self.nbytes += checkpoint.nbytes

    def drop_checkpoint(self, node: Node[S, C]) -> None:
        """Out of memory; it stays known if it is on disk."""
        if node.checkpoint is not None:
            self.nbytes -= node.checkpoint.nbytes
            node.checkpoint = None

    def drop_segment(self, node: Node[S, C]) -> None:
        """Out of memory; the node stays, its state is on disk."""
        assert node.stored
        if node.segment is not None:
            self.nbytes -= node.segment.nbytes
            node.segment = None

    def fill(self, node: Node[S, C], segment: S) -> None:
        """State that came back from disk."""
        if node.segment is None:
            node.segment = segment
            self.nbytes += segment.nbytes

    def remove(self, node: Node[S, C]) -> list[Node[S, C]]:
        """Forget a node and all under it; returns them."""
        gone = list(node.below())
        for each in gone:
            self.nbytes -= each.nbytes + (each.checkpoint.nbytes if each.checkpoint else 0)
            del self.nodes[each.id]
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        if parent.parent is None and not parent.children:
            self._roots = {s: r for s, r in self._roots.items() if r is not parent}
        return gone

    def clear(self) -> None:
        self._roots.clear()
        self.nodes.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Every invariant, for tests and idle moments."""
        seen: dict[int, Node[S, C]] = {}
        nbytes = 0
        for root in self._roots.values():
            assert root.children, "an empty root is removed"
            for node in root.below():
                if node is root:
                    continue
                seen[node.id] = node
                parent = node.parent
                assert parent is not None and parent.children[node.tokens[0]] is node
                assert node.start == parent.end and node.tokens
                assert node.segment is not None or node.stored
                nbytes += node.nbytes + (node.checkpoint.nbytes if node.checkpoint else 0)
        assert seen == self.nodes
        assert nbytes == self.nbytes, (nbytes, self.nbytes)


def shared(run: Sequence[int], tokens: Sequence[int], offset: int) -> int:
    """How many tokens of `run` are found in `tokens` from `offset` on, counted from the start."""
    limit = min(len(run), len(tokens) - offset)
    if run[:limit] == tokens[offset : offset + limit]:
        return limit
    low, high = 0, limit  # run[:low] is known to be equal, run[:high] to differ
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == tokens[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low
