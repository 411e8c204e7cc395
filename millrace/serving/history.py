"""The last ten minutes of the server in figures, one sample a second, and the requests that ended last.

Pure: readings of counters in, rates and levels out. It knows nothing of clocks, models or who looks on.
"""

from __future__ import annotations

import itertools
from collections import deque

import msgspec

SECONDS = 600
"""Samples that are kept, one a second."""
MOST_ENDED = 500
"""Requests that are remembered after their end."""


class Reading(msgspec.Struct, frozen=True):
    """Counters that only grow, and levels, of all models together."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0
    reserved_bytes: int = 0


class HistorySample(msgspec.Struct, frozen=True):
    """One second: rates per second, and levels at its end."""

    time: float
    """Seconds since 1970."""
    generated: float
    """Tokens made a second."""
    prefilled: float
    """Prompt tokens run a second."""
    cached: float
    """Prompt tokens a second whose state was found and need not be run."""
    running: int
    """Requests that have begun to answer."""
    waiting: int
    """Requests without a first token yet."""
    kv_bytes: int
    cache_bytes: int
    cache_disk_bytes: int
    reserved_bytes: int


class History:
    def __init__(self, seconds: int = SECONDS) -> None:
        self.samples: deque[HistorySample] = deque(maxlen=seconds)
        self._last: Reading | None = None

    def record(self, time: float, elapsed: float, reading: Reading) -> HistorySample:
        """`elapsed` are the seconds since the last call."""
        before, self._last = self._last or reading, reading
        sample = HistorySample(
            time=round(time, 3),
            generated=_rate(reading.generated_tokens - before.generated_tokens, elapsed),
            prefilled=_rate(reading.prefilled_tokens - before.prefilled_tokens, elapsed),
            cached=_rate(reading.cached_tokens - before.cached_tokens, elapsed),
            running=reading.running,
            waiting=reading.waiting,
            kv_bytes=reading.kv_bytes,
            cache_bytes=reading.cache_bytes,
            cache_disk_bytes=reading.cache_disk_bytes,
            reserved_bytes=reading.reserved_bytes,
        )
        self.samples.append(sample)
        return sample

    def columns(self) -> dict[str, list[float]]:
        """Every field as one list: the names are told once, not six hundred times."""
        return {
            name: [getattr(sample, name) for sample in self.samples]
            for name in HistorySample.__struct_fields__
        }


def _rate(count: int, elapsed: float) -> float:
    return round(count / elapsed, 2) if elapsed > 0 else 0.0


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that is over, as it was."""

    id: str
    model: str
    endpoint: str
    outcome: str
    ended_at: float
    """Seconds since 1970."""
    prompt_tokens: int
    cached_tokens: int
    cache_hit: str
    generated_tokens: int
    ttft_seconds: float | None
    seconds: float
    tokens_per_second: float | None
    resumes: int
    key: str | None = None
    """The API key that it came with: recorded by its caller id, and shown by its name where it has one;
    None on a server without keys."""


class EndedRequests:
    """The last ones, newest last."""

    def __init__(self, most: int = MOST_ENDED) -> None:
        self._kept: deque[EndedRequest] = deque(maxlen=most)

    def add(self, ended: EndedRequest) -> None:
        self._kept.append(ended)

    def newest(self, most: int, viewer: str | None = None) -> list[EndedRequest]:
        """Of one caller, or of all."""
        seen = (r for r in reversed(self._kept) if viewer is None or r.key == viewer)
        return list(itertools.islice(seen, most))
