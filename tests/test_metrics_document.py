"""docs/metrics.md is what /metrics has; `MILLRACE_WRITE_DOCS=1` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.serving.metrics import Metrics

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

What `GET /metrics` reports, in Prometheus' text form. `tests/test_metrics_document.py` writes this page
from the source. [monitoring.md](monitoring.md) says what to watch; with `--metrics-names vllm` the same
figures have [vLLM's names](api.md#looking-on).

| series | type | labels | |
|---|---|---|---|
"""


def document() -> str:
    return HEAD + "".join(map(_row, _collectors()))


def _collectors() -> list[object]:
    return list(Metrics().registry._collector_to_names)


def _row(collector: object) -> str:
    (family,) = collector.describe()  # type: ignore[attr-defined]
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in collector._labelnames)  # type: ignore[attr-defined]
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n"


def test_the_document_lists_every_series() -> None:
    written = document()
    if os.environ.get("MILLRACE_WRITE_DOCS"):
        DOCUMENT.write_text(written, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == written
