"""Which texts run next: batches of like lengths, bounded by their tokens, fair between requests.

Whoever has had least goes first, counted in tokens with what fills rows up; of those who had as much,
whoever has least left. A newcomer starts with what the least served has had, so that it neither waits
for all that came before it nor makes those wait. Pure: no clock, no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LIKE = 0.75
"""Texts of at least this part of a batch's longest go with it: less is mostly filling."""
_NEAR = 16
"""Or those that lack no more tokens than this."""


class QueuedText(NamedTuple):
    length: int
    place: int
    """Its number in its request."""


class Pick(NamedTuple):
    request: int
    place: int
    length: int


@dataclass
class _Waiting:
    request: int
    texts: list[QueuedText]
    """Shortest first."""
    served: float
    priority: int
    left: int = field(default=0)
    """Tokens that have not been run."""

    def longest_within(self, bound: int | None) -> int:
        """The place in `texts` of the longest that is within the bound; -1 if none is."""
        if bound is None:
            return len(self.texts) - 1
        return bisect_right(self.texts, QueuedText(bound, 1 << 62)) - 1


class Queue:
    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def texts(self) -> int:
        return sum(len(w.texts) for w in self._waiting.values())

    def add(self, request: int, texts: Iterable[QueuedText], priority: int = 0) -> None:
        ordered = sorted(texts)
        if ordered:
            least = min((w.served for w in self._waiting.values()), default=0.0)
            left = sum(t.length for t in ordered)
            self._waiting[request] = _Waiting(request, ordered, least, priority, left)

    def drop(self, request: int) -> None:
        self._waiting.pop(request, None)

    def next(
        self, tokens: int, *, within: int | None = None, without: Sequence[int] = ()
    ) -> list[Pick]:
        """The next batch: at most `tokens` with its filling, unless one text alone is longer.

        Only of texts that are no longer than `within`, and of none of the requests in `without`.
        """
        order = sorted(
            (w for w in self._waiting.values() if w.request not in without),
            key=lambda w: (-w.priority, w.served, w.left),
        )
        batch: list[Pick] = []
        longest = within
        for waiting in order:
            place = waiting.longest_within(longest)
            if not batch and place >= 0:
                longest = waiting.texts[place].length
            if not batch and place < 0:
                continue
            assert longest is not None
            room = max(1, tokens // longest) - len(batch)
            shortest = min(_LIKE * longest, longest - _NEAR)
            first = place
            while first >= 0 and place - first < room and waiting.texts[first].length >= shortest:
                first -= 1
            taken = waiting.texts[first + 1 : place + 1]
            del waiting.texts[first + 1 : place + 1]
            batch += [Pick(waiting.request, t.place, t.length) for t in taken]
            waiting.served += len(taken) * longest
            waiting.left -= sum(t.length for t in taken)
            if not waiting.texts:
                del self._waiting[waiting.request]
            if len(batch) >= max(1, tokens // longest):
                break
        return batch
