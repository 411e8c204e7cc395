"""Which nodes leave the disk when room is needed: a pure policy over a picture of the tree.

Only leaves go, so that what stays can always be reached. Among them the one that has been unused
for longest goes first, and size counts a little: sixteen times the size weighs like twice the age,
because one large leaf makes the room of many small ones. Two nodes may share a file, whose room
comes free with the last of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_SMALLEST = 4096


@dataclass(frozen=True)
class Candidate:
    id: int
    parent: int
    used: float
    size: int
    """Its part of the files it uses."""
    files: tuple[tuple[int, int], ...] = ()
    """Each file it uses, and the bytes of the whole file."""
    held: bool = False
    """Being written or read: neither it nor what is above it may go."""


def score(age: float, size: int) -> float:
    """The higher, the sooner it goes."""
    return (max(age, 0.0) + 1.0) * math.sqrt(math.sqrt(max(size, _SMALLEST)))


def plan(nodes: Iterable[Candidate], need: int, spare: int, now: float) -> list[int]:
    """The nodes to drop, children before parents, so that `need` bytes come free and up to `spare`
    more; nothing if `need` cannot be reached."""
    tree = {node.id: node for node in nodes}
    children = Counter(node.parent for node in tree.values())
    users = Counter(file for node in tree.values() for file, _ in node.files)
    heap = [
        (-score(now - node.used, node.size), node.id)
        for node in tree.values()
        if not children[node.id] and not node.held
    ]
    heapq.heapify(heap)
    order: list[int] = []
    freed = 0
    while heap and freed < need + spare:
        node = tree[heapq.heappop(heap)[1]]
        if freed >= need and node.size > need + spare - freed:
            break
        order.append(node.id)
        for file, size in node.files:
            users[file] -= 1
            if not users[file]:
                freed += size
        children[node.parent] -= 1
        parent = tree.get(node.parent)
        if parent is not None and not children[parent.id] and not parent.held:
            heapq.heappush(heap, (-score(now - parent.used, parent.size), parent.id))
    return order if freed >= need else []
