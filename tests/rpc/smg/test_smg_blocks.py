"""The cache's tree as blocks: whatever becomes of it, what is told adds up to what is there."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cache.radix import Node, RadixTree
from millrace.cache.sizes import StateSizes
from millrace.protocol.prefixes import CacheChange
from millrace.rpc.smg.blocks import SIZE, BlockEvent, Cleared, KvBlocks, Removed, StoredBlocks


class Follower:
    """What a gateway knows: each block's place in a chain, and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def take(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case StoredBlocks(parent=parent, blocks=blocks):
                    assert parent is None or parent in self.blocks
                    for block in blocks:
                        assert block.hash not in self.blocks
                        self.blocks[block.hash] = parent, tuple(block.tokens)
                        parent = block.hash
                case Removed(hashes=hashes):
                    for hash in hashes:
                        del self.blocks[hash]
                case Cleared():
                    self.blocks.clear()

    def lines(self) -> set[tuple[int, ...]]:
        """The tokens from the start to the end of each block."""
        return {self._line(hash) for hash in self.blocks}

    def _line(self, hash: int) -> tuple[int, ...]:
        parent, tokens = self.blocks[hash]
        return tokens if parent is None else self._line(parent) + tokens


def held(tree: RadixTree) -> set[tuple[int, ...]]:
    """The same of the tree itself: a line for each block whose last token a node has."""
    found = set()
    for node in tree.nodes.values():
        line = tuple(t for n in node.line() for t in n.tokens)
        found |= {
            line[:end]
            for end in range(SIZE, len(line) + 1, SIZE)
            if node.start < end <= node.end and not node.salt
        }
    return found


def keep(tree: RadixTree, salt: str, tokens: list[int]) -> None:
    match = tree.match(salt, tokens)
    at: Node | None = match.nodes[-1] if match.nodes else None
    if at is not None and match.partial:
        at = tree.cut(at, match.length - at.start)
    if match.length < len(tokens):
        leaf = tree.attach(salt, at, tokens[match.length :])
        assert leaf is not None
        tree.set_resident(leaf, True)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=70)
steps = st.one_of(
    st.tuples(st.just("keep"), prompts, st.sampled_from(["", "", "", "salt"])),
    st.tuples(st.just("forget"), st.integers(0, 99), st.just("")),
    st.tuples(st.just("merge"), st.integers(0, 99), st.just("")),
    st.tuples(st.just("clear"), st.just(0), st.just("")),
)


@settings(max_examples=200)
@given(st.lists(steps, max_size=25))
def test_blocks_follow_the_tree_through_cuts_merges_and_evictions(
    script: list[tuple[str, list[int] | int, str]],
) -> None:
    tree = RadixTree(StateSizes(1))
    tree.changes = []
    blocks, told = KvBlocks(), Follower()
    for word, what, salt in script:
        nodes = list(tree.nodes.values())
        if isinstance(what, list):
            keep(tree, salt, what)
        elif word == "clear":
            tree.clear()
        elif nodes:
            node = nodes[what % len(nodes)]
            if word == "forget":
                tree.remove(node)
            elif len(node.children) == 1:
                tree.merge(node, next(iter(node.children.values())))
        changes: list[CacheChange] = tree.changes
        tree.changes = []
        told.take(blocks.take(changes))
        assert told.lines() == held(tree)
        assert blocks.count == len(told.blocks)
        fresh = Follower()
        fresh.take(blocks.snapshot())
        assert fresh.blocks == told.blocks


def test_what_stands_for_a_picture_is_told_as_what_no_prompt_has() -> None:
    tree = RadixTree(StateSizes(1))
    tree.changes = []
    keep(tree, "", [7] * 8 + [-5, 2**62 + 3, 2**31] + [7] * 21)
    (stored,) = KvBlocks().take(tree.changes)
    assert isinstance(stored, StoredBlocks) and len(stored.blocks) == 2
    assert [t for t in stored.blocks[0].tokens if t != 7] == [2**32 - 5, 2**31 + 3, 2**31]
