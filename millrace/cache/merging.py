"""Which nodes become one, so that prompts run in small chunks do not leave chains of small nodes.

Pure. A merge copies both segments: it is worth that while the upper one is small, and never where
something would be lost by it.
"""

from __future__ import annotations

from millrace.cache.radix import Node

LEAST = 256
"""Tokens: a node with one child is merged with it until it has so many."""
MOST = 4096
"""Tokens that a merge may copy."""


def partner(upper: Node) -> Node | None:
    """The only child, if the two are to become one node."""
    if upper.parent is None or upper.pins or len(upper.children) != 1:
        return None
    lower = next(iter(upper.children.values()))
    if lower.pins or not (upper.resident and lower.resident):
        return None
    size = len(upper.tokens)
    if size >= LEAST or size + len(lower.tokens) > MOST:
        return None
    # A checkpoint needs a node that ends where it was made. Of what is on disk only a small upper node
    # is forgotten there, and written anew with the other.
    return None if upper.has_checkpoint or lower.stored else lower
