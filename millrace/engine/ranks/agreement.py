"""One picture of all ranks' disks, for the one index that decides. Pure.

Each rank writes its own part of a node and may fail to, or run out of room before others do. The index
hears that a node is stored when all ranks have stored it, that it is read when all have read it, and that
it is gone as soon as one of them has it no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from millrace.cache.observations import (
    AnyObservation,
    DiskTrouble,
    DiskUsage,
    FoundOnDisk,
    GoneFromDisk,
    LostState,
    ReadFromDisk,
    ReadNode,
    StoredOnDisk,
)


def agreed(found: Sequence[Sequence[FoundOnDisk]]) -> list[FoundOnDisk]:
    """What all ranks have at the start, in the first one's order; the parents of a node are there, too."""
    first, *others = found
    has = [{_key(node) for node in theirs} for theirs in others]
    kept: list[FoundOnDisk] = []
    known = {0}
    for node in first:
        if node.parent in known and all(_key(node) in theirs for theirs in has):
            known.add(node.node)
            kept.append(node)
    return kept


def _key(node: FoundOnDisk) -> tuple[object, ...]:
    return (node.node, node.parent, node.salt, node.tokens, node.checkpoint)


class Agreement:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reads: dict[int, dict[int, ReadFromDisk]] = defaultdict(dict)
        self._stored: dict[int, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
        self._usage: dict[int, DiskUsage] = {}
        self._told: DiskUsage | None = None

    def heard(self, rank: int, observations: Iterable[AnyObservation]) -> list[AnyObservation]:
        """What the index may know now that a rank has seen this."""
        out: list[AnyObservation] = []
        for seen in observations:
            match seen:
                case ReadFromDisk(ticket=ticket):
                    self._reads[ticket][rank] = seen
                    if len(self._reads[ticket]) == self._ranks:
                        out.append(_read(self._reads.pop(ticket)))
                case StoredOnDisk(node=node, checkpoint=checkpoint):
                    self._stored[node][rank].append(checkpoint)
                    out += self._all_stored(node)
                case GoneFromDisk(nodes=nodes):
                    for node in nodes:
                        self._stored.pop(node, None)
                    out.append(seen)
                case DiskUsage():
                    self._usage[rank] = seen
                    out += self._most()
                case DiskTrouble(message=text, off=off):
                    out.append(DiskTrouble(f"Rank {rank}: {text}" if rank else text, off))
                case LostState() | FoundOnDisk():
                    # What an operation has not found in memory, no rank has found.
                    out += [seen] if not rank else []
        return out

    def _all_stored(self, node: int) -> list[AnyObservation]:
        by_rank = self._stored[node]
        if sum(bool(told) for told in by_rank.values()) < self._ranks:
            return []
        checkpoints = [told.pop(0) for told in by_rank.values()]
        if not any(by_rank.values()):
            del self._stored[node]
        return [StoredOnDisk(node, all(checkpoints))]

    def _most(self) -> list[AnyObservation]:
        usage = self._usage.values()
        most = DiskUsage(max(u.nbytes for u in usage), max(u.backlog for u in usage))
        if most == self._told:
            return []
        self._told = most
        return [most]


def _read(by_rank: dict[int, ReadFromDisk]) -> ReadFromDisk:
    first = by_rank[0]
    others = [{node.node: node for node in seen.nodes} for rank, seen in by_rank.items() if rank]
    failed = {node: None for seen in by_rank.values() for node in seen.failed}
    nodes: list[ReadNode] = []
    for node in first.nodes:
        theirs = [each.get(node.node) for each in others]
        there = [found for found in theirs if found is not None and found.tokens == node.tokens]
        if len(there) < len(others) or node.node in failed:
            failed[node.node] = None
            continue
        checkpoint = node.checkpoint and all(found.checkpoint for found in there)
        nodes.append(ReadNode(node.node, node.tokens, checkpoint))
    return ReadFromDisk(first.ticket, tuple(nodes), tuple(failed))
