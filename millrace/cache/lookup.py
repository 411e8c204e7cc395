"""What of a prompt is known and where it can go on from: the tree and the planner put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.cache.planner import Layers, RestorePlan, plan
from millrace.cache.radix import Match, Node, RadixTree


@dataclass(frozen=True)
class PrefixLookup:
    match: Match
    plan: RestorePlan
    holder: Node | None
    """The node with the plan's checkpoint."""

    @property
    def at(self) -> int:
        return self.plan.at

    @property
    def path(self) -> list[Node]:
        """The nodes whose segments are needed."""
        return [n for n in self.match.nodes if n.start < self.plan.at]


def look_up(
    tree: RadixTree,
    needs: Layers,
    salt: str,
    tokens: Sequence[int],
    limit: int,
    *,
    memory_only: bool,
) -> PrefixLookup:
    """The best place to go on from within the first `limit` tokens, from memory alone or disk too."""

    def has(node: Node) -> bool:
        return node.checkpoint if memory_only else node.has_checkpoint

    found = tree.match(salt, tokens[: max(0, limit)])
    if memory_only:
        found = found.in_memory()
    passed = {n.end: n for n in found.nodes if n.end <= found.length and has(n)}
    ahead: dict[int, Node] = {}
    if needs.window is not None and found.nodes and found.length < needs.window:
        below = found.nodes[-1].below()
        ahead = {n.end: n for n in below if n.end < needs.window and has(n)}
    best = plan(needs, found.length, limit, passed, ahead)
    holder = None
    if best.checkpoint is not None:
        holder = passed.get(best.checkpoint) or ahead[best.checkpoint]
    return PrefixLookup(found, best, holder)
