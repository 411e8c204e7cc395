"""The connections of a listener whose callers have not proved themselves yet: a bounded number.

When one more comes, an old one is closed rather than the new one refused: otherwise strangers who connect
and send nothing keep the group's own processes out for as long as their deadlines last.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class UnprovenCaller:
    """A connection that waits for its caller's proof."""

    peer: str
    """The caller's address."""
    close: Callable[[], None]
    spoke: bool = False
    """Whether its first message has come."""


class Greetings:
    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._pending: list[UnprovenCaller] = []
        """In the order in which they came."""

    def enter(self, peer: str, close: Callable[[], None]) -> UnprovenCaller:
        """Count a new connection; where there are too many, one of the others is closed."""
        mine = UnprovenCaller(peer, close)
        with self._lock:
            dropped = self._victim() if len(self._pending) >= self._most else None
            if dropped is not None:
                self._pending.remove(dropped)
            self._pending.append(mine)
        if dropped is not None:
            dropped.close()
        return mine

    def leave(self, pending: UnprovenCaller) -> None:
        with self._lock:
            if pending in self._pending:
                self._pending.remove(pending)

    def _victim(self) -> UnprovenCaller:
        """Of the address with the most connections the oldest that has sent nothing, else the oldest."""
        counts = Counter(p.peer for p in self._pending)
        return min(self._pending, key=lambda p: (-counts[p.peer], p.spoke))
