"""The radix tree of token runs: which prefixes are known, and what of their state is where.

A tree per salt. An edge and the node it leads to are one object: a run of tokens whose state (a
segment) is in memory, on disk or both, and perhaps state at its end that cannot be cut (a checkpoint).
The tree counts bytes and holds none: no arrays, no clock, no policy.

    root ── system prompt ──┬── question 1 ── answer 1 ── question 2
                            └── another question
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from millrace.cache.sizes import StateSizes
from millrace.protocol.prefixes import AllGone, CacheChange, RunCut, RunKept, RunsGone, RunsMerged

TOKEN_BYTES = 8
"""What a token itself costs in the tree; runs without state would be free otherwise."""


@dataclass(eq=False)
class Node:
    id: int
    salt: str
    tokens: list[int]
    start: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    resident: bool = False
    """The segment is in memory. Where no layer can be cut there is nothing to hold, and it is."""
    own_page: bool = True
    """The page in which its segment begins is not the one in which its parent's ends."""
    stored: bool = False
    """The segment is on disk, or on its way there."""
    checkpoint: bool = False
    """There is a checkpoint in memory."""
    checkpoint_stored: bool = False
    boundary: bool = False
    """The checkpoint is at the end of a message, a prompt or an answer, not just on the way."""
    used: float = 0.0
    shared: int = 0
    """How many of its first tokens a second request has used."""
    owner: int = 0
    """The request that kept it first, where that is known."""
    pins: int = 0
    """Somebody waits for this node: it may be neither given up nor merged."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint or self.checkpoint_stored

    def line(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        at: Node | None = self
        while at is not None and at.parent is not None:
            nodes.append(at)
            at = at.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """This node and all under it, children after their parents."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())


@dataclass(frozen=True)
class Match:
    """How far a run of tokens is known: whole nodes, and perhaps a part of one more."""

    nodes: list[Node]
    length: int

    @property
    def partial(self) -> bool:
        return bool(self.nodes) and self.length < self.nodes[-1].end

    def in_memory(self) -> Match:
        """The part whose segments are in memory without a gap."""
        for i, node in enumerate(self.nodes):
            if not node.resident:
                return Match(self.nodes[:i], min(self.length, node.start))
        return self


class RadixTree:
    def __init__(self, sizes: StateSizes) -> None:
        self.sizes = sizes
        self.nbytes = 0
        """Memory held: tokens, segments and checkpoints."""
        self.nodes: dict[int, Node] = {}
        self.changes: list[CacheChange] | None = None
        """What happened since somebody last took it, where anybody wants to know: of runs without a
        salt, since others than its requests have no use for a salted one."""
        self._roots: dict[str, Node] = {}
        self._next_id = 1

    def match(self, salt: str, tokens: Sequence[int]) -> Match:
        """The longest known prefix, to the token."""
        at = self._roots.get(salt)
        nodes: list[Node] = []
        length = 0
        while at is not None and length < len(tokens):
            child = at.children.get(tokens[length])
            if child is None:
                break
            nodes.append(child)
            common = shared_tokens(child.tokens, tokens, length)
            length += common
            if common < len(child.tokens):
                break
            at = child
        return Match(nodes, length)

    def attach(
        self, salt: str, parent: Node | None, tokens: list[int], id: int | None = None
    ) -> Node | None:
        """Add a leaf without state under a node, or under the salt's root. None if something
        with the same first token is there, or the id is taken."""
        above = parent or self._roots.get(salt) or Node(0, salt, [], 0, None)
        if not tokens or tokens[0] in above.children or id in self.nodes:
            return None
        if parent is None:
            self._roots[salt] = above
        leaf = Node(self._new_id(id), salt, tokens, above.end, above)
        above.children[tokens[0]] = leaf
        self.nodes[leaf.id] = leaf
        self.nbytes += self.held(leaf)
        self._tell(salt, lambda: RunKept(leaf.id, above.id, list(tokens)))
        return leaf

    def cut(self, node: Node, at: int) -> Node:
        """Make the first `at` tokens of a node a node of their own, above it; returns that."""
        assert 0 < at < len(node.tokens) and node.parent is not None
        upper = Node(self._new_id(), node.salt, node.tokens[:at], node.start, node.parent)
        upper.resident, upper.stored = node.resident, node.stored
        upper.own_page, node.own_page = node.own_page, False
        upper.used, upper.owner = node.used, node.owner
        upper.shared, node.shared = min(node.shared, at), max(0, node.shared - at)
        node.parent.children[node.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.start += at
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self.nodes[upper.id] = upper
        self._tell(node.salt, lambda: RunCut(node.id, at, upper.id))
        return upper

    def merge(self, upper: Node, lower: Node) -> Node:
        """Make a node and its only child one, with a new id and nothing on disk; returns that."""
        assert upper.parent is not None and list(upper.children.values()) == [lower]
        assert upper.resident and lower.resident and not upper.checkpoint
        into = Node(
            self._new_id(), upper.salt, upper.tokens + lower.tokens, upper.start, upper.parent
        )
        into.children = lower.children
        for child in into.children.values():
            child.parent = into
        into.resident, into.checkpoint, into.boundary = True, lower.checkpoint, lower.boundary
        into.used, into.owner = max(upper.used, lower.used), lower.owner
        into.own_page = self.sizes.joined_own(
            upper.start, lower.start, upper=upper.own_page, lower=lower.own_page
        )
        into.shared = upper.shared
        if upper.shared == len(upper.tokens):
            into.shared += lower.shared
        upper.parent.children[upper.tokens[0]] = into
        del self.nodes[upper.id], self.nodes[lower.id]
        self.nodes[into.id] = into
        self.nbytes += self.held(into) - self.held(upper) - self.held(lower)
        self._tell(into.salt, lambda: RunsMerged(upper.id, lower.id, into.id))
        return into

    def remove(self, node: Node) -> list[Node]:
        """Forget a node and all under it; returns them."""
        gone = list(node.below())
        for each in gone:
            self.nbytes -= self.held(each)
            del self.nodes[each.id]
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._tell(node.salt, lambda: RunsGone([each.id for each in gone]))
        return gone

    def set_resident(self, node: Node, resident: bool) -> None:
        self.nbytes -= self.held(node)
        node.resident = resident
        self.nbytes += self.held(node)

    def set_checkpoint(self, node: Node, there: bool) -> None:
        self.nbytes -= self.held(node)
        node.checkpoint = there
        self.nbytes += self.held(node)

    def held(self, node: Node) -> int:
        return self.run_bytes(node) + self.checkpoint_bytes(node)

    def run_bytes(self, node: Node) -> int:
        """Memory of its tokens and their segment."""
        return TOKEN_BYTES * len(node.tokens) + self.segment_bytes(node)

    def segment_bytes(self, node: Node) -> int:
        """Memory of its segment."""
        if not node.resident:
            return 0
        return self.sizes.segment(node.start, node.end, own=node.own_page)

    def checkpoint_bytes(self, node: Node) -> int:
        return self.sizes.checkpoint(node.end) if node.checkpoint else 0

    def clear(self) -> None:
        self._roots.clear()
        self.nodes.clear()
        self.nbytes = 0
        self._tell("", AllGone)

    def _tell(self, salt: str, change: Callable[[], CacheChange]) -> None:
        if self.changes is not None and not salt:
            self.changes.append(change())

    def check(self) -> None:
        """Every invariant, for tests and idle moments."""
        seen: dict[int, Node] = {}
        for salt, root in self._roots.items():
            assert root.children, "an empty root is removed"
            for node in root.below():
                assert node.salt == salt
                if node is root:
                    continue
                seen[node.id] = node
                parent = node.parent
                assert parent is not None and parent.children[node.tokens[0]] is node
                assert node.start == parent.end and node.tokens
                pinned = any(n.pins for n in node.below())
                assert node.resident or node.stored or pinned, "state is somewhere"
                assert 0 <= node.shared <= len(node.tokens) and node.pins >= 0
                assert not node.stored or parent.parent is None or parent.stored
        assert seen == self.nodes
        held = sum(self.held(node) for node in seen.values())
        assert held == self.nbytes, (held, self.nbytes)

    def _new_id(self, id: int | None = None) -> int:
        new = self._next_id if id is None else id
        self._next_id = max(self._next_id, new + 1)
        return new


def shared_tokens(run: Sequence[int], tokens: Sequence[int], offset: int) -> int:
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
