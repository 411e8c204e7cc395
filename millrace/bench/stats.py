"""From samples to figures: percentiles, throughput over the measured window, and goodput.

Pure. Only requests that succeeded count towards latencies and tokens; failures count towards the
number of requests, and against goodput.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from millrace.bench.samples import RequestSample


class Spread(msgspec.Struct, frozen=True):
    """A distribution in a few numbers."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must meet to be good, in seconds; None asks nothing."""

    ttft: float | None = None
    itl: float | None = None
    """Held against the 99th percentile of the request's own gaps."""
    e2e: float | None = None

    @property
    def asked(self) -> bool:
        return (self.ttft, self.itl, self.e2e) != (None, None, None)


class Goodput(msgspec.Struct, frozen=True):
    good: int
    share: float
    requests_per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one level."""

    requests: int
    succeeded: int
    rejected: int
    errors: dict[str, int]
    """Failures by kind, with the HTTP status where there was one; 429 is under `rejected`."""
    window_s: float
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    prompt_tokens_mean: float | None
    cached_share: float | None
    short: int
    """Requests that ended before their max_tokens."""
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    """Per request: the time after the first text over the tokens after the first."""
    e2e: Spread | None
    goodput: Goodput | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of a sorted sequence lies, interpolated linearly."""
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    below, above = ordered[low], ordered[high]
    return below if below == above else below + (above - below) * (place - low)


def spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def window(samples: Iterable[RequestSample]) -> float:
    """Seconds under load: in each round from its first request's start to its last one's end."""
    spans: dict[int, tuple[float, float]] = {}
    for s in samples:
        first, last = spans.get(s.round, (math.inf, -math.inf))
        spans[s.round] = min(first, s.started), max(last, s.started + s.e2e)
    return math.fsum(last - first for first, last in spans.values())


def meets(sample: RequestSample, slo: Slo) -> bool:
    """Whether a request succeeded within every target that is set."""
    if not sample.ok:
        return False
    if slo.ttft is not None and (sample.ttft is None or sample.ttft > slo.ttft):
        return False
    if slo.e2e is not None and sample.e2e > slo.e2e:
        return False
    if slo.itl is None or not sample.gaps:
        return True
    return percentile(sorted(sample.gaps), 0.99) <= slo.itl


def summarise(samples: Sequence[RequestSample], slo: Slo) -> Summary:
    ok = [s for s in samples if s.ok]
    failures = [s.failure for s in samples if s.failure]
    seconds = window(samples)
    tokens = sum(s.tokens for s in ok)
    prompts = [s.prompt_tokens for s in ok if s.prompt_tokens is not None]
    cached = [s.cached_tokens for s in ok if s.cached_tokens is not None]
    good = sum(meets(s, slo) for s in samples)
    return Summary(
        requests=len(samples),
        succeeded=len(ok),
        rejected=sum(f.kind == "rejected" for f in failures),
        errors=dict(Counter(f.label for f in failures if f.kind != "rejected")),
        window_s=seconds,
        output_tokens=tokens,
        tokens_per_s=_rate(tokens, seconds),
        requests_per_s=_rate(len(ok), seconds),
        prompt_tokens_mean=sum(prompts) / len(prompts) if prompts else None,
        cached_share=_rate(sum(cached), sum(prompts)) if cached else None,
        short=sum(s.tokens < s.max_tokens for s in ok),
        ttft=spread(s.ttft for s in ok if s.ttft is not None),
        itl=spread(gap for s in ok for gap in s.gaps),
        tpot=spread(sum(s.gaps) / (s.tokens - 1) for s in ok if s.gaps and s.tokens > 1),
        e2e=spread(s.e2e for s in ok),
        goodput=Goodput(good, _rate(good, len(samples)), _rate(good, seconds))
        if slo.asked
        else None,
    )


def _rate(amount: float, over: float) -> float:
    return amount / over if over > 0 else 0.0
