"""How busy a model's engine is, in the numbers that gateways weigh workers by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.serving.client import EngineClient
from millrace.serving.engine_request import EngineRequest

_LEAST = 1.0
"""Seconds over which a rate is taken."""


@dataclass(frozen=True)
class Load:
    running: int = 0
    """Answers that have a place in the batch, those whose prompts wait for their turn included."""
    waiting: int = 0
    """Answers beyond those that run at a time: what gateways take for too much at eight."""
    waiting_tokens: int = 0
    """Tokens of prompts of which nothing was run yet."""
    pending_tokens: int = 0
    """Prompt tokens of all that have no token yet."""
    used_tokens: int = 0
    """Tokens whose state running requests hold."""
    most_tokens: int = 0
    """Tokens for whose state there is room."""
    throughput: float = 0.0
    hit_rate: float = 0.0
    """The part of all prompts' tokens that was found in the cache."""
    most_running: int = 0
    silence: float | None = None
    """Seconds since the engine last said what it did, while it has something to do."""

    @property
    def counts(self) -> Load:
        """Without what changes by itself."""
        return replace(self, silence=None, throughput=0.0)

    @property
    def usage(self) -> float:
        return min(1.0, self.used_tokens / self.most_tokens) if self.most_tokens else 0.0

    @property
    def utilization(self) -> float:
        return min(1.0, self.running / self.most_running) if self.most_running else 0.0


class Loads:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = clock(), 0
        self._rate = 0.0

    def of(self, client: EngineClient | None, most_running: int) -> Load:
        """Of a model's engine; without one there is no load."""
        if client is None:
            return Load(most_running=most_running)
        requests = list(client.in_flight.values())
        queued = [r for r in requests if r.phase == "queued"]
        answers = sum(r.answers for r in requests)
        running = min(answers, most_running)
        totals, ready = client.metrics.totals, client.ready
        per_token = ready.kv_bytes_per_token if ready else 0
        return Load(
            running=running,
            waiting=answers - running,
            waiting_tokens=sum(r.prompt_tokens for r in queued),
            pending_tokens=sum(r.prompt_tokens for r in requests if r.first_token is None),
            used_tokens=sum(
                r.prompt_tokens + r.tokens_generated for r in requests if r.phase != "queued"
            ),
            most_tokens=ready.kv_budget // per_token if ready and per_token else 0,
            throughput=self._throughput(totals.generated_tokens),
            hit_rate=totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
            most_running=most_running,
            silence=self._silence(client, requests),
        )

    def _silence(self, client: EngineClient, requests: list[EngineRequest]) -> float | None:
        if not requests:
            return None
        # Before it has said anything, it is silent since it was first asked.
        since = max(client.metrics.heard, min(r.arrived for r in requests))
        return max(0.0, self._clock() - since)

    def _throughput(self, total: int) -> float:
        now = self._clock()
        since, before = self._seen
        if now - since >= _LEAST:
            self._rate = max(0, total - before) / (now - since)
            self._seen = now, total
        return self._rate
