"""The dashboard file asks Prometheus only for what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
