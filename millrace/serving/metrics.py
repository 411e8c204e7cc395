"""What is counted and timed, for Prometheus. One object per server; tests make their own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from millrace.config import MetricsNames
from millrace.protocol import DeviceMemory, Step
from millrace.protocol.prefixes import HitKind
from millrace.protocol.specprefill import Selected
from millrace.serving.engine_request import EngineRequest
from millrace.serving.history import EndedRequest, EndedRequests, Reading
from millrace.serving.metric_names import NamedMetrics

# A second series beside each, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]
_FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_REASONS = ("stop", "length", "abort", "error")
_PICTURES = ("encoded", "found", "skipped")
_SPARSE = ("scored", "draft", "kept")
_COARSE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    def __init__(self, names: MetricsNames = "millrace") -> None:
        self.registry = CollectorRegistry()
        self._named = NamedMetrics(self.registry, names)
        by_model = ["model"]

        def counter(name: str, text: str, labels: list[str] = by_model) -> Counter:
            return Counter(f"millrace_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, labels: list[str] = by_model) -> Gauge:
            return Gauge(f"millrace_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"millrace_{name}", text, by_model, buckets=buckets, registry=self.registry
            )

        self.requests = counter(
            "requests",
            "Requests that have ended, by endpoint and outcome",
            ["endpoint", "model", "outcome"],
        )
        self.finished = counter(
            "finished_requests", "Requests that have ended, by finish reason", ["model", "reason"]
        )
        self.prompt = counter("prompt_tokens", "Prompt tokens, cached ones included")
        self.cached = counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self.hits = counter(
            "cache_hits", "Requests by the kind of prefix cache hit", ["model", "kind"]
        )
        self.prefilled = counter("prefilled_tokens", "Prompt tokens that the model has run")
        self.generated = counter("generated_tokens", "Generated tokens")
        self.restarts = counter(
            "engine_restarts", "Engine processes that ended and were started again"
        )
        self.running = gauge("running", "Sequences that are being answered")
        self.queued = gauge("queued", "Requests without a first token")
        self.kv_bytes = gauge("kv_bytes", "Bytes of key-value state of running requests")
        self.kv_limit = gauge("kv_limit_bytes", "The most bytes that this state may take")
        self.cache_bytes = gauge(
            "cache_bytes", "Bytes of the prefix cache, in memory and on disk", ["model", "tier"]
        )
        self.device = gauge(
            "device_bytes", "Bytes of the device's memory, as MLX counts them", ["model", "kind"]
        )
        self.pictures = counter(
            "pictures",
            "Pictures: encoded, found encoded, or skipped because the prefix cache had them",
            ["model", "kind"],
        )
        self.picture_bytes = gauge("picture_bytes", "Bytes of picture features in memory")
        self.sparse = counter(
            "specprefill_tokens",
            "SpecPrefill: prompt tokens scored, run by the draft, and kept",
            ["model", "kind"],
        )
        self.scoring = counter(
            "specprefill_scoring_seconds",
            "SpecPrefill: seconds from the start of scoring to the selection",
        )
        self.sparse_prefill = counter(
            "specprefill_prefill_seconds",
            "SpecPrefill: seconds from the selection to the first token",
        )
        self.loads = counter("model_loads", "Model loads, by outcome", ["model", "outcome"])
        self.unloads = counter("model_unloads", "Model unloads, by reason", ["model", "reason"])
        self.limit = gauge("memory_limit_bytes", "Bytes that all models together may take", [])
        self.reserved = gauge(
            "memory_reserved_bytes", "Bytes reserved by models: the sum of their ceilings", []
        )
        self.others = gauge(
            "memory_other_servers_bytes",
            "Bytes held by other servers on this machine at the last load",
            [],
        )
        self.weights = gauge("weight_bytes", "Bytes of loaded weights")
        self.ceiling = gauge("ceiling_bytes", "The most bytes that a loaded model may take")
        self._models: dict[str, ModelMetrics] = {}
        self.ended = EndedRequests()
        self.ttft = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token", _COARSE
        )
        self.gap = histogram(
            "inter_token_seconds", "Seconds between two tokens of a sequence", _FINE
        )
        self.e2e = histogram(
            "request_seconds", "Seconds from arrival to the end of the answer", _COARSE
        )
        self.step = histogram("step_seconds", "Seconds between two steps with decode tokens", _FINE)

    def refused(self, endpoint: str, code: str) -> None:
        """A request that was turned away before it ran; the code of the error is its outcome."""
        self.requests.labels(endpoint, "", code).inc()

    def text(self) -> bytes:
        return generate_latest(self._named)

    def of(self, model: str) -> ModelMetrics:
        """The same as before for one that is loaded again."""
        return self._models.setdefault(model, ModelMetrics(self, model))

    def loaded(self, model: str, outcome: str) -> None:
        self.loads.labels(model, outcome).inc()

    def unloaded(self, model: str, reason: str) -> None:
        self.unloads.labels(model, reason).inc()

    def reading(self, running: int, waiting: int, reserved: int) -> Reading:
        """All models together, those that have left included: what they counted stays counted."""
        found = self._models.values()
        return Reading(
            generated_tokens=sum(m.totals.generated_tokens for m in found),
            prefilled_tokens=sum(m.totals.prefilled_tokens for m in found),
            cached_tokens=sum(m.totals.cached_tokens for m in found),
            running=running,
            waiting=waiting,
            kv_bytes=sum(m.held.kv_bytes for m in found),
            cache_bytes=sum(m.held.cache_bytes for m in found),
            cache_disk_bytes=sum(m.held.cache_disk_bytes for m in found),
            reserved_bytes=reserved,
        )

    def memory_limit(self, bytes: int) -> None:
        self.limit.set(bytes)

    def memory_reserved(self, bytes: int) -> None:
        self.reserved.set(bytes)

    def other_servers(self, bytes: int) -> None:
        self.others.set(bytes)


@dataclass
class Totals:
    """Since the server began."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0


@dataclass
class Held:
    """Bytes that an engine holds now: state of running requests, and prefixes by tier."""

    kv_bytes: int = 0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0


class ModelMetrics:
    """The same, seen from one model's engine."""

    def __init__(self, all: Metrics, model: str) -> None:
        self.totals = Totals()
        self.held = Held()
        self.heard = 0.0
        """When the engine last said what it did, on the monotonic clock."""
        self._all = all
        self.model = model
        self._step = all.step.labels(model)
        self._gap = all.gap.labels(model)
        self._generated = all.generated.labels(model)
        self._running = all.running.labels(model)
        self._kv_bytes = all.kv_bytes.labels(model)
        self._tiers = [all.cache_bytes.labels(model, tier) for tier in ("memory", "disk")]
        for kind in get_args(HitKind):
            all.hits.labels(model, kind)
        for kind in _PICTURES:
            all.pictures.labels(model, kind)
        for reason in _REASONS:
            all.finished.labels(model, reason)
        for kind in _SPARSE:
            all.sparse.labels(model, kind)
        all.picture_bytes.labels(model)
        for seldom in (
            all.prompt,
            all.cached,
            all.prefilled,
            all.restarts,
            all.queued,
            all.kv_limit,
            all.weights,
            all.ceiling,
            all.scoring,
        ):
            seldom.labels(model)  # a series that is there from the start, at 0
        for timed in (all.ttft, all.e2e):
            timed.labels(model)

    def arrived(self, active: EngineRequest) -> None:
        self.totals.prompt_tokens += active.prompt_tokens
        self._all.prompt.labels(self.model).inc(active.prompt_tokens)

    def ready(self, kv_limit: int, weights: int) -> None:
        """Its engine has this much for the state of running requests, and holds these weights."""
        self._all.kv_limit.labels(self.model).set(kv_limit)
        self._all.weights.labels(self.model).set(weights)

    def ceiling(self, bytes: int) -> None:
        """The most that it may take."""
        self._all.ceiling.labels(self.model).set(bytes)

    def queue(self, waiting: int) -> None:
        self._all.queued.labels(self.model).set(waiting)

    def idle(self) -> None:
        self._running.set(0)
        self._kv_bytes.set(0)
        self.held.kv_bytes = 0

    def gone(self) -> None:
        """Its engine has ended and holds nothing any more."""
        self.idle()
        self.queue(0)
        self.ready(0, 0)
        self.ceiling(0)
        self.cache(0, 0)
        self._all.picture_bytes.labels(self.model).set(0)
        for kind in DeviceMemory.__struct_fields__:
            self._all.device.labels(self.model, kind).set(0)

    def stepped(self, step: Step) -> None:
        self.heard = time.monotonic()
        if step.seconds:
            self._step.observe(step.seconds)
        if step.memory is not None:
            for kind in DeviceMemory.__struct_fields__:
                self._all.device.labels(self.model, kind).set(getattr(step.memory, kind))
        if (seen := step.pictures) is not None:
            for kind in _PICTURES:
                self._all.pictures.labels(self.model, kind).inc(getattr(seen, kind))
            self._all.picture_bytes.labels(self.model).set(seen.nbytes)
        self._running.set(step.running)
        self._kv_bytes.set(step.kv_bytes)
        self.held.kv_bytes = step.kv_bytes
        self.cache(step.cache_bytes, step.cache_disk_bytes)

    def cache(self, memory: int, disk: int) -> None:
        """What the prefix cache holds in memory and on disk."""
        self.held.cache_bytes, self.held.cache_disk_bytes = memory, disk
        for tier, held in zip(self._tiers, (memory, disk), strict=True):
            tier.set(held)

    def prefilled(self, tokens: int) -> None:
        self.totals.prefilled_tokens += tokens
        self._all.prefilled.labels(self.model).inc(tokens)

    def selected(self, found: Selected | None) -> None:
        """A draft has chosen what stays of a prompt, or is about to."""
        if found is None:
            return
        kept = sum(end - begin for begin, end in found.kept)
        for kind, count in zip(_SPARSE, (found.scored, found.run, kept), strict=True):
            self._all.sparse.labels(self.model, kind).inc(count)
        self._all.scoring.labels(self.model).inc(found.seconds)

    def began(self, active: EngineRequest) -> None:
        """The first of a request's texts is encoded."""
        assert active.first_token is not None
        self._all.ttft.labels(self.model).observe(active.first_token - active.arrived)

    def first_token(self, active: EngineRequest) -> None:
        assert active.first_token is not None
        self._all.ttft.labels(self.model).observe(active.first_token - active.arrived)
        if active.sparse is not None:
            seconds = active.sparse["prefill_seconds"] or 0.0
            self._all.sparse_prefill.labels(self.model).inc(seconds)
        self.totals.cached_tokens += active.cached
        self._all.cached.labels(self.model).inc(active.cached)
        self._all.hits.labels(self.model, active.hit).inc()
        # The prompt's last token is run by the batch step that draws the first new one.
        self.prefilled(1)

    def token(self, gap: float | None, count: int) -> None:
        if gap is not None:
            self._gap.observe(gap)
        self.totals.generated_tokens += count
        self._generated.inc(count)

    def restarted(self) -> None:
        self._all.restarts.labels(self.model).inc()

    def ended(self, active: EngineRequest, seconds: float) -> None:
        self.totals.requests += 1
        self._all.e2e.labels(self.model).observe(seconds)
        self._all.finished.labels(self.model, _reason(active)).inc()
        self._all.requests.labels(active.endpoint, self.model, active.outcome).inc()
        self._all.ended.add(_told(active, self.model, seconds))


def _reason(active: EngineRequest) -> str:
    if active.outcome == "ok":
        return "length" if active.finish == "length" else "stop"
    return "error" if active.outcome == "error" else "abort"


def _told(active: EngineRequest, model: str, seconds: float) -> EndedRequest:
    first, generated = active.first_token, active.tokens_generated
    decoding = active.last_token - first if first is not None else 0.0
    return EndedRequest(
        id=active.id,
        model=model,
        endpoint=active.endpoint,
        outcome=active.outcome,
        ended_at=round(time.time(), 3),
        prompt_tokens=active.prompt_tokens,
        cached_tokens=active.cached,
        cache_hit=active.hit,
        generated_tokens=generated,
        ttft_seconds=None if first is None else round(first - active.arrived, 3),
        seconds=round(seconds, 3),
        tokens_per_second=round((generated - 1) / decoding, 2)
        if generated > 1 and decoding > 0
        else None,
        resumes=active.deaths,
        key=active.caller or None,
    )
