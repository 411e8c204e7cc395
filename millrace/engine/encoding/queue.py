"""Which texts run next: batches of like lengths, bounded by their tokens, fair between callers and between
the requests of each.

The caller that has had least goes first, counted in tokens with padding; of its requests, those of the
highest priority, then the one that has had least, then the one with least left. A newcomer starts with what
the least served has had, so that it neither waits for all that came before it nor makes those wait. Pure:
no clock, no model.
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
    caller: str
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
        self._served: dict[str, float] = {}
        """Tokens that each caller with texts in the queue has had."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def texts(self) -> int:
        return sum(len(w.texts) for w in self._waiting.values())

    def add(
        self, request: int, texts: Iterable[QueuedText], priority: int = 0, caller: str = ""
    ) -> None:
        ordered = sorted(texts)
        if ordered:
            self._served.setdefault(caller, min(self._served.values(), default=0.0))
            own = (w.served for w in self._waiting.values() if w.caller == caller)
            left = sum(t.length for t in ordered)
            self._waiting[request] = _Waiting(
                request, ordered, caller, min(own, default=0.0), priority, left
            )

    def drop(self, request: int) -> None:
        gone = self._waiting.pop(request, None)
        if gone is not None and all(w.caller != gone.caller for w in self._waiting.values()):
            del self._served[gone.caller]

    def next(
        self, tokens: int, *, within: int | None = None, without: Sequence[int] = ()
    ) -> list[Pick]:
        """The next batch: at most `tokens` with its filling, unless one text alone is longer.

        Only of texts that are no longer than `within`, and of none of the requests in `without`.
        """
        order = sorted(
            (w for w in self._waiting.values() if w.request not in without),
            key=lambda w: (self._served[w.caller], w.caller, -w.priority, w.served, w.left),
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
            self._served[waiting.caller] += len(taken) * longest
            waiting.left -= sum(t.length for t in taken)
            if not waiting.texts:
                self.drop(waiting.request)
            if len(batch) >= max(1, tokens // longest):
                break
        return batch
