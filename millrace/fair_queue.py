"""A queue of work in which callers get equal shares of the time, not of the places.

Pure: no threads and no clock. Between callers, the one that has used the least time goes first; within
one caller, the entry with the earliest arrival plus expected cost. The limit per caller applies before
the limit for all: when the queue is full, the caller with the most entries loses one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millrace.errors import Overloaded

T = TypeVar("T")


class QueueFull(Exception):
    """An entry has no place; `waiting` entries are ahead, `own` of them of the same caller."""

    def __init__(self, waiting: int, own: int = 0) -> None:
        super().__init__(f"{waiting} entries wait, {own} of this caller")
        self._who = f"{own} requests of yours" if own else f"{waiting} requests"

    def overloaded(self, work: str) -> Overloaded:
        """The error for a client; `work` is what is waited for, like `to have a prompt read`."""
        return Overloaded(f"{self._who} wait {work}. Try again in a moment.", retry_after=5.0)


@dataclass(eq=False)
class QueueEntry(Generic[T]):
    """Work that waits: whose it is, what it is, and where it stands among its caller's."""

    caller: str
    item: T
    order: float
    """Arrival plus expected seconds: short work first, but long work is not passed over for ever."""


@dataclass(eq=False)
class _CallerShare(Generic[T]):
    used: float
    """Seconds that the caller has used, counted from the least of the callers present when it came."""
    running: int = 0
    waiting: list[QueueEntry[T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """The entries that wait, and who is running how many."""

    def __init__(self, *, per_caller: int, total: int) -> None:
        """At most `per_caller` entries of a caller and `total` of all wait."""
        self._per_caller = per_caller
        self._total = total
        self._shares: dict[str, _CallerShare[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def waiting(self, caller: str) -> int:
        share = self._shares.get(caller)
        return len(share.waiting) if share else 0

    def running(self, caller: str) -> int:
        share = self._shares.get(caller)
        return share.running if share else 0

    def push(
        self, caller: str, item: T, *, now: float, expected: float = 0.0
    ) -> tuple[QueueEntry[T], QueueEntry[T] | None]:
        """The new entry, and the entry that lost its place to it, if any; raises QueueFull."""
        entry = QueueEntry(caller, item, now + expected)
        displaced = self._displaced(entry)
        if displaced is not None:
            self.discard(displaced)
        share = self._share(caller)
        bisect.insort(share.waiting, entry, key=lambda e: e.order)
        self._count += 1
        return entry, displaced

    def pop(self, may_run: Callable[[str], bool] = lambda caller: True) -> QueueEntry[T] | None:
        """The next entry of those callers that may run one, which then counts as running."""
        able = [(s.used, c) for c, s in self._shares.items() if s.waiting and may_run(c)]
        if not able:
            return None
        share = self._shares[min(able)[1]]
        self._count -= 1
        share.running += 1
        return share.waiting.pop(0)

    def begin(self, caller: str) -> None:
        """Count work that did not have to wait as running."""
        self._share(caller).running += 1

    def end(self, caller: str, seconds: float) -> None:
        """Count work as done, which took this long."""
        share = self._shares[caller]
        share.running -= 1
        share.used += seconds
        self._forget(caller)

    def discard(self, entry: QueueEntry[T]) -> bool:
        """Take an entry out; False if it does not wait any more."""
        share = self._shares.get(entry.caller)
        if share is None or entry not in share.waiting:
            return False
        share.waiting.remove(entry)
        self._count -= 1
        self._forget(entry.caller)
        return True

    def drain(self) -> list[T]:
        """Take all entries out."""
        found = [entry.item for share in self._shares.values() for entry in share.waiting]
        for caller, share in list(self._shares.items()):
            share.waiting.clear()
            self._forget(caller)
        self._count = 0
        return found

    def _displaced(self, new: QueueEntry[T]) -> QueueEntry[T] | None:
        """Which entry must go for a new one; None if there is room. The new one may be the one."""
        own = self.waiting(new.caller)
        if own >= self._per_caller:
            crowded = new.caller
        elif self._count >= self._total:
            crowded = max(self._shares, key=lambda c: len(self._shares[c].waiting))
            if len(self._shares[crowded].waiting) <= own:
                crowded = new.caller
        else:
            return None
        last = self._shares[crowded].waiting[-1] if self.waiting(crowded) else new
        if crowded == new.caller and last.order <= new.order:
            raise QueueFull(self._count, own)
        return last

    def _share(self, caller: str) -> _CallerShare[T]:
        if caller not in self._shares:
            # A caller that comes has used nothing of the present contention, and saves up nothing either.
            least = min((s.used for s in self._shares.values()), default=0.0)
            self._shares[caller] = _CallerShare(least)
        return self._shares[caller]

    def _forget(self, caller: str) -> None:
        share = self._shares[caller]
        if not share.running and not share.waiting:
            del self._shares[caller]
