"""The series of /metrics under vLLM's names, for dashboards and autoscalers that know only those.

They are the same numbers, renamed as they are read; what vLLM counts and this server does not is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from millrace.config import MetricsNames

_NAMES = {
    "millrace_running": ("num_requests_running",),
    "millrace_queued": ("num_requests_waiting",),
    "millrace_prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "millrace_cached_tokens": ("prefix_cache_hits",),
    "millrace_generated_tokens": ("generation_tokens",),
    "millrace_finished_requests": ("request_success",),
    "millrace_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    # The second of these, as of the key-value memory below, is what older releases call it.
    "millrace_inter_token_seconds": (
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    "millrace_request_seconds": ("e2e_request_latency_seconds",),
}
_USED, _LIMIT = "millrace_kv_bytes", "millrace_kv_limit_bytes"
_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_LABELS = {"model": "model_name", "reason": "finished_reason"}


class NamedMetrics:
    """What a registry has, under the names that are wanted; as much of a registry as printing needs."""

    def __init__(self, registry: CollectorRegistry, names: MetricsNames) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        if self._names != "vllm":
            yield from families
        if self._names != "millrace":
            yield from in_vllms_words(families)


def in_vllms_words(families: Iterable[Metric]) -> Iterator[Metric]:
    held: dict[str, dict[str, float]] = {_USED: {}, _LIMIT: {}}
    for family in families:
        for name in _NAMES.get(family.name, ()):
            yield _renamed(family, f"vllm:{name}")
        if family.name in held:
            held[family.name] = {s.labels["model"]: s.value for s in family.samples}
    for name in _USAGE:
        usage = GaugeMetricFamily(
            f"vllm:{name}", "Part of the key-value memory in use, 1 is all", labels=[]
        )
        for model, used in held[_USED].items():
            limit = held[_LIMIT].get(model, 0.0)
            usage.add_sample(usage.name, _labels({"model": model}), used / limit if limit else 0.0)
        yield usage


def _renamed(family: Metric, name: str) -> Metric:
    other = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        ending = sample.name.removeprefix(family.name)
        other.add_sample(name + ending, _labels(sample.labels), sample.value)
    return other


def _labels(labels: dict[str, str]) -> dict[str, str]:
    return {_LABELS.get(k, k): v for k, v in labels.items()} | {"engine": "0"}
