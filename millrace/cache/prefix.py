"""The prefix cache as one object: the index's decisions, carried out at once by the store.

Knows nothing itself; for callers that do not keep deciding and executing apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.cache.disk import DiskTier
from millrace.cache.index import PrefixIndex
from millrace.cache.observations import AnyObservation
from millrace.cache.operations import Operation, Source
from millrace.cache.state import Layout, measured_sizes
from millrace.cache.store import SegmentStore, StateSource
from millrace.protocol import CacheReport, HitKind

_ANY = Source("job", 0)
"""There is one source at a time: the one at hand."""


@dataclass
class RestoredCaches:
    caches: list[Any]
    at: int
    hit: HitKind


class Ticket:
    """State on its way from the disk."""

    def __init__(self, index: PrefixIndex, number: int) -> None:
        self._index = index
        self.number = number

    @property
    def done(self) -> bool:
        return not self._index.waits(self.number)


class PrefixCache:
    def __init__(
        self,
        model: Any,
        layout: Layout,
        memory: int,
        disk: DiskTier | None = None,
        *,
        pack: bool = False,
        problem: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.store = SegmentStore(model, layout, disk, pack=pack)
        self.index = PrefixIndex(
            layout.needs,
            measured_sizes(model, layout, pack),
            memory,
            disk_budget=disk.budget if disk else None,
            problem=problem,
        )
        for found in self.store.found():
            self._observe(found)
        self._hear()

    @property
    def nbytes(self) -> int:
        return self.index.nbytes

    @property
    def disk_bytes(self) -> int:
        return self.index.disk_bytes

    @property
    def loading(self) -> bool:
        return self.index.loading

    def known(self, salt: str, tokens: Sequence[int]) -> int:
        return self.index.known(salt, tokens)

    def fetch(self, salt: str, tokens: Sequence[int]) -> Ticket | None:
        number = self._do(lambda out: self.index.fetch(out, salt, tokens))[0]
        return None if number is None else Ticket(self.index, number)

    def restore(
        self, salt: str, tokens: Sequence[int], ticket: Ticket | None = None
    ) -> RestoredCaches | None:
        number = ticket.number if ticket else None
        found, caches = self._do(
            lambda out: self.index.restore(out, 0, salt, tokens, number, self._clock())
        )
        return RestoredCaches(caches, found.at, found.hit) if found else None

    def keep(
        self, salt: str, tokens: Sequence[int], source: StateSource, *, state: bool, boundary: bool
    ) -> int:
        now = self._clock()
        kept: int = self._do(
            lambda out: self.index.keep(
                out, _ANY, salt, tokens, state=state, boundary=boundary, now=now
            ),
            source,
        )[0]
        return kept

    def tick(self, *, idle: bool) -> float | None:
        self._hear()
        again: float | None = self._do(lambda out: self.index.tick(out, self._clock(), idle=idle))[
            0
        ]
        return again

    def clear(self) -> None:
        self._do(self.index.clear)

    def close(self, timeout: float) -> None:
        writes: list[Operation] = []
        self._hear()
        self.index.close(writes, self._clock())
        self.store.close(writes, timeout)

    def report(self, id: str) -> CacheReport:
        self._hear()
        return self.index.report(id)

    def check(self) -> None:
        self.index.check()
        assert self.index.state_bytes == self.store.nbytes

    def _hear(self) -> None:
        for event in self.store.poll():
            self._observe(event)

    def _observe(self, event: AnyObservation) -> None:
        self._do(lambda out: self.index.observe(out, event, self._clock()))

    def _do(
        self, decide: Callable[[list[Operation]], Any], source: StateSource | None = None
    ) -> tuple[Any, list[Any]]:
        """Decide and execute; returns what was decided, and the caches that were restored."""
        out: list[Operation] = []
        decided = decide(out)
        caches: list[Any] = []
        for operation in out:
            caches = self.store.execute(operation, source) or caches
        return decided, caches
