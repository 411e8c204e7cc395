"""Which nodes leave the disk when room is needed: a pure policy over a picture of the tree.

Only leaves go, so that what stays can always be reached. Among them the one that has been unused
for longest goes first, and size counts a little: sixteen times the size weighs like twice the age,
because one large leaf makes the room of many small ones. Two nodes may share a file, whose room
comes free with the last of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

_SMALLEST = 4096


class File(NamedTuple):
    id: int
    size: int
    users: int


class Candidate(NamedTuple):
    id: int
    parent: int
    children: int
    used: float
    size: int
    """Its part of the files it uses."""
    files: tuple[File, ...] = ()


def score(age: float, size: int) -> float:
    """The higher, the sooner it goes."""
    return (max(age, 0.0) + 1.0) * math.sqrt(math.sqrt(max(size, _SMALLEST)))


def plan(
    leaves: Iterable[Candidate],
    above: Callable[[int], Candidate | None],
    need: int,
    spare: int,
    now: float,
) -> list[int]:
    """The nodes to drop, children before parents, so that `need` bytes come free and up to `spare`
    more; nothing if `need` cannot be reached. `above` gives a node that could go once its children
    have gone."""
    heap = [(-score(now - leaf.used, leaf.size), leaf) for leaf in leaves]
    heapq.heapify(heap)
    children: dict[int, int] = {}
    users: dict[int, int] = {}
    order: list[int] = []
    freed = 0
    while heap and freed < need + spare:
        node = heapq.heappop(heap)[1]
        if freed >= need and node.size > need + spare - freed:
            break
        order.append(node.id)
        for file in node.files:
            users[file.id] = users.get(file.id, file.users) - 1
            if not users[file.id]:
                freed += file.size
        parent = above(node.parent)
        if parent is not None:
            children[parent.id] = children.get(parent.id, parent.children) - 1
            if not children[parent.id]:
                heapq.heappush(heap, (-score(now - parent.used, parent.size), parent))
    return order if freed >= need else []
