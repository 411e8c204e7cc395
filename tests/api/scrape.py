"""What a server says of itself in /metrics, read with Prometheus's own parser."""

from __future__ import annotations

from conftest import Server
from prometheus_client.parser import text_string_to_metric_families


def families(server: Server) -> dict[str, str]:
    """Family name → type."""
    return {f.name: f.type for f in text_string_to_metric_families(_text(server))}


def total(server: Server, sample: str, **labels: str) -> float:
    """The sum of a sample over all label sets that have these labels."""
    return sum(
        s.value
        for family in text_string_to_metric_families(_text(server))
        for s in family.samples
        if s.name == sample and labels.items() <= s.labels.items()
    )


def label_names(server: Server, sample: str) -> set[str]:
    return {
        name
        for family in text_string_to_metric_families(_text(server))
        for s in family.samples
        if s.name == sample
        for name in s.labels
    }


def _text(server: Server) -> str:
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text
