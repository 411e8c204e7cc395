"""What a prefill chunk takes, by its size: a line through what chunks of about each size took lately.

A chunk of any size reads all the weights, and looks back at what stands before it; that is the base.
Each token adds its own computing. Both change with the prompt's length and the machine's other work,
and neither can be told from chunks of one size: what larger and smaller ones took is remembered, follows
the machine's pace as the others show it, and is forgotten when it has become old.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

GUESSED_WORTH = 24
"""How many tokens cost what a chunk costs by itself, until chunks of two sizes have been seen."""
SMALLEST_CHUNK = 8
_TRY = 3 * SMALLEST_CHUNK
"""Tokens of a chunk that is to show what a token adds."""
SMALL = 32
"""Tokens of a chunk that shows what a chunk costs by itself."""
_SURE, _SURE_FOR = 3, 16
"""Small chunks that must have been seen before they are thought to be dear, and chunks after which one is
tried again: a single one may have met a bad moment, and would never be tried otherwise."""
_WEIGHT = 0.3
"""What the latest chunk counts for among those of its size."""
_PACE_WEIGHT = 0.1
"""What it counts for among those of other sizes."""
_FORGOTTEN = 64
"""Chunks of other sizes after which a size is no longer known."""
_APART = 1.25
"""How many times as large a chunk must be to tell what a token adds. Of nearly equal ones the later
counts."""
_LEAST_SHARE = 0.1
"""A token never counts for less than this part of a chunk's seconds per token."""
_SHRINKING = 0.97
_FIRST_GUESS = 1e-3


@dataclass
class _Seen:
    """Chunks of about one size."""

    tokens: float
    seconds: float
    age: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_SURE))
    """What the last of them took."""


class ChunkCost:
    def __init__(self) -> None:
        self.largest = 0.0
        """About the most tokens that a chunk has had lately."""
        self._seen: dict[int, _Seen] = {}
        """By the power of two that is next below the size."""
        self._points: list[tuple[float, float]] = []
        """Tokens and seconds, by size; more tokens never take less time."""

    @property
    def known(self) -> bool:
        return bool(self._seen)

    @property
    def token(self) -> float:
        """What each token adds, from the smallest chunks known to the largest."""
        points = self._points
        if not points:
            return _FIRST_GUESS
        (tokens, seconds), (more, longer) = points[0], points[-1]
        if more > tokens:
            return max((longer - seconds) / (more - tokens), _LEAST_SHARE * longer / more, 1e-9)
        return max(seconds / (tokens + GUESSED_WORTH), 1e-9)

    @property
    def base(self) -> float:
        points = self._points
        if not points:
            return 0.0
        tokens, seconds = points[0]
        return max(0.0, seconds - tokens * self.token)

    @property
    def least(self) -> float | None:
        """What the smallest chunk takes, judged from small ones; None if there was none lately."""
        small = self._small()
        added = self.token if len(self._points) > 1 else 0.0
        beyond = (min(s.latest) - added * max(0.0, s.tokens - SMALLEST_CHUNK) for s in small)
        return max(0.0, min(beyond)) if small else None

    @property
    def sure(self) -> bool:
        """Whether enough small chunks were seen lately to tell what they take."""
        small = self._small()
        return sum(len(s.latest) for s in small) >= _SURE and min(s.age for s in small) <= _SURE_FOR

    def _small(self) -> list[_Seen]:
        return [s for s in self._seen.values() if s.tokens <= SMALL]

    @property
    def worth(self) -> int:
        """How many tokens take as long as a chunk does without any; a try, if that is not known: of the
        smallest, unless that is what has been seen."""
        points = self._points
        if self.least is None or len(points) < 2:
            return SMALLEST_CHUNK if points and points[0][0] >= 2 * SMALLEST_CHUNK else _TRY
        return max(0, int(self.least / self.token) - SMALLEST_CHUNK)

    def of(self, tokens: float) -> float:
        """Seconds that a chunk of so many tokens should take."""
        points = self._points
        if len(points) < 2:
            return self.base + tokens * self.token
        # The two known sizes around it, or the last two.
        after = next((i for i, (size, _) in enumerate(points) if tokens <= size and i), -1)
        (size, seconds), (larger, longer) = points[after - 1], points[after]
        slope = (longer - seconds) / (larger - size)
        if tokens > larger:  # beyond what has been seen
            return longer + (tokens - larger) * max(slope, _LEAST_SHARE * longer / larger)
        return max(0.0, min(longer, seconds + (tokens - size) * slope))  # it may be rounded up

    def within(self, seconds: float, most: int) -> int:
        """The most tokens, up to so many, that should take no longer than this."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.of(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def saw(self, tokens: int, seconds: float) -> None:
        self.largest = max(float(tokens), _SHRINKING * self.largest)
        size = tokens.bit_length()
        expected = self.of(tokens)
        if expected > 0:
            pace = max(0.5, min(2.0, seconds / expected)) ** _PACE_WEIGHT
            for seen in self._seen.values():
                seen.seconds *= pace
        for seen in self._seen.values():
            seen.age += 1
        mine = self._seen.setdefault(size, _Seen(tokens, seconds))
        mine.tokens += _WEIGHT * (tokens - mine.tokens)
        mine.seconds += _WEIGHT * (seconds - mine.seconds)
        mine.latest.append(seconds)
        mine.age = 0
        self._seen = {n: seen for n, seen in self._seen.items() if seen.age <= _FORGOTTEN}
        self._points = self._line()  # asked for many times a turn

    def _line(self) -> list[tuple[float, float]]:
        apart: list[_Seen] = []
        for size in sorted(self._seen):
            seen = self._seen[size]
            if not apart or seen.tokens >= _APART * apart[-1].tokens:
                apart.append(seen)
            elif seen.age < apart[-1].age:
                apart[-1] = seen
        points: list[tuple[float, float]] = []
        for seen in apart:
            longest = points[-1][1] if points else 0.0
            points.append((seen.tokens, max(seen.seconds, longest)))
        return points
