"""The first rank's store: what it says of the disk is what all ranks' disks agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.cache.disk import DiskTier
from millrace.cache.observations import AnyObservation, FoundOnDisk
from millrace.cache.segments import Segments
from millrace.cache.state import Layout
from millrace.cache.store import SegmentStore
from millrace.engine.ranks.agreement import Agreement, agreed
from millrace.engine.ranks.leader import Leader


class LeadingStore(SegmentStore):
    def __init__(
        self,
        leader: Leader,
        make_caches: Callable[[], list[Any]],
        layout: Layout,
        disk: DiskTier | None = None,
        segments: Segments[Any] | None = None,
    ) -> None:
        super().__init__(make_caches, layout, disk, segments)
        self._leader = leader
        self._agreement = Agreement(1 + len(leader.found))

    def found(self) -> list[FoundOnDisk]:
        mine = super().found()
        if self._disk is None:
            return mine
        kept = agreed([mine, *self._leader.found.values()])
        known = {node.node for node in kept}
        self.forget_others(known)
        self._leader.know(sorted(known))
        self._leader.found.clear()
        return kept

    def poll(self) -> list[AnyObservation]:
        if self._disk is None:
            return super().poll()
        seen = self._agreement.heard(0, super().poll())
        for rank, theirs in self._leader.observed():
            seen += self._agreement.heard(rank, theirs)
        return seen
