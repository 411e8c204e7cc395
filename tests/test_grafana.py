"""The dashboard file asks Prometheus only for what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from millrace.config import MetricsNames
from millrace.protocol import Step
from millrace.serving.metrics import Metrics

FILE = Path(__file__).resolve().parents[1] / "docs" / "grafana.json"


def test_every_panel_asks_for_series_that_there_are() -> None:
    metrics = Metrics()
    metrics.of("one").restarted()
    metrics.refused("/", "x")
    told = metrics.text().decode()
    assert "_created" not in told
    asked = {
        name
        for panel in json.loads(FILE.read_text())["panels"]
        for target in panel["targets"]
        for name in re.findall(r"millrace_\w+", target["expr"])
    }
    missing = {name for name in asked if not re.search(rf"^{name}(\{{| )", told, re.M)}
    assert missing == set()


VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
}


def test_the_same_figures_have_vllms_names_where_they_are_wanted() -> None:
    told = {}
    for names in get_args(MetricsNames):
        metrics = Metrics(names)
        model = metrics.of("one")
        model.ready(1000, 500)
        model.stepped(Step(running=3, kv_bytes=250))
        model.token(0.25, 7)
        metrics.refused("/", "x")
        told[names] = metrics.text().decode()
    families = {f.name: f for f in text_string_to_metric_families(told["vllm"])}
    series = {s.name: s for f in families.values() for s in f.samples}
    assert set(series) >= VLLM
    assert {name.partition(":")[0] for name in series} == {"vllm"}
    assert all(s.labels["model_name"] == "one" for s in series.values())
    assert series["vllm:num_requests_running"].value == 3
    assert series["vllm:kv_cache_usage_perc"].value == 0.25
    assert series["vllm:generation_tokens_total"].value == 7
    assert series["vllm:inter_token_latency_seconds_sum"].value == 0.25
    assert set(re.findall(r'success_total\{.*?finished_reason="(\w+)"', told["vllm"])) == {
        "stop", "length", "abort", "error"
    }  # fmt: skip
    assert "vllm" not in told["millrace"]
    assert sorted(told["both"].splitlines()) == sorted(
        (told["millrace"] + told["vllm"]).splitlines()
    )
