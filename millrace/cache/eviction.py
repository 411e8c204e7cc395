"""What is given up first when memory is short. Pure: it knows ages, sizes and no state.

Of two things of the same age the one that took more computing per byte is worth more; of two that
cost the same, the one used later. State that other state in memory builds on is never first: a prefix
with a hole in it is of no use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from millrace.cache.radix import Node, RadixTree

Part = Literal["segment", "checkpoint"]
HALF_LIFE = 600.0
"""Seconds without use that halve the worth of a state."""
ON_THE_WAY = 0.25
"""A checkpoint between two boundaries is rarely where a later prompt parts; it is worth less."""


def worth(tokens: int, nbytes: int, age: float) -> float:
    """Tokens saved per byte held, fading with age; long runs count for more than their length.

    Attention makes a token of a long prompt dearer than one of a short prompt, and a long prompt is
    what somebody would wait for.
    """
    saved = tokens * (1.0 + math.log2(1.0 + tokens / 256))
    return float(saved / max(1, nbytes) * 0.5 ** (max(0.0, age) / HALF_LIFE))


def victims(tree: RadixTree, now: float, needed: int) -> Iterator[tuple[Node, Part]]:
    """What to give up, one after the other, until `needed` bytes are free or nothing is left."""
    scored: list[tuple[float, int, Node, Part]] = []
    for node in tree.nodes.values():
        if node.pins:
            continue
        age = now - node.used
        if node.checkpoint:
            value = worth(node.end, tree.checkpoint_bytes(node), age)
            value *= 1.0 if node.boundary else ON_THE_WAY
            scored.append((value, node.id, node, "checkpoint"))
        if _freed(tree, node):
            scored.append((worth(node.end, tree.run_bytes(node), age), node.id, node, "segment"))
    scored.sort(key=lambda item: item[:2])
    freed = 0
    gone: set[int] = set()
    progress = True
    while freed < needed and progress:
        progress = False
        for _, _, node, part in scored:
            if freed >= needed:
                return
            if part == "checkpoint":
                freed += tree.checkpoint_bytes(node)
            elif node.id in gone or not _last(node, gone):
                continue
            else:
                gone.add(node.id)
                freed += _freed(tree, node)
            progress = True
            yield node, part
        scored = [s for s in scored if s[3] == "segment" and s[1] not in gone]


def _freed(tree: RadixTree, node: Node) -> int:
    """What giving up its segment brings: a node that is on disk stays known."""
    if not node.resident:
        return 0
    return tree.segment_bytes(node) if node.stored else tree.run_bytes(node)


def _last(node: Node, gone: set[int]) -> bool:
    """Whether nothing in memory builds on this node's segment."""
    return all(not c.resident or c.id in gone for c in node.children.values())
