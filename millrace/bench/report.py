"""What a run showed, as a table with the targets side by side, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from millrace import __version__
from millrace.bench.samples import Cell, Level, RequestSample, Results
from millrace.bench.stats import Slo, Spread, Summary, summarise
from millrace.errors import SetupError

Value = Callable[[Summary], float | None]
Format = Callable[[float], str]


class _Row(msgspec.Struct, frozen=True):
    name: str
    value: Value
    show: Format
    ratio: bool = True


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"


def _plain(value: float) -> str:
    return f"{value:.0f}"


def _decimal(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"


def _spread_rows(name: str, pick: Callable[[Summary], Spread | None]) -> list[_Row]:
    def part(get: Callable[[Spread], float]) -> Value:
        def value(summary: Summary) -> float | None:
            found = pick(summary)
            return None if found is None else get(found)

        return value

    return [
        _Row(f"{name} mean", part(lambda s: s.mean), _seconds),
        _Row(f"{name} p50", part(lambda s: s.p50), _seconds),
        _Row(f"{name} p90", part(lambda s: s.p90), _seconds),
        _Row(f"{name} p99", part(lambda s: s.p99), _seconds),
    ]


_ROWS = [
    _Row("generated tokens/s", lambda s: s.tokens_per_s, _decimal),
    _Row("requests/s", lambda s: s.requests_per_s, _decimal),
    *_spread_rows("TTFT", lambda s: s.ttft),
    *_spread_rows("inter-token", lambda s: s.itl),
    _Row("time per token p50", lambda s: s.tpot.p50 if s.tpot else None, _seconds),
    *_spread_rows("end to end", lambda s: s.e2e),
    _Row("goodput share", lambda s: s.goodput.share if s.goodput else None, _percent, False),
    _Row("goodput requests/s", lambda s: s.goodput.requests_per_s if s.goodput else None, _decimal),
    _Row("prompt tokens mean", lambda s: s.prompt_tokens_mean, _plain, False),
    _Row("prompt tokens from cache", lambda s: s.cached_share, _percent, False),
    _Row("succeeded", lambda s: s.succeeded, _plain, False),
    _Row("ended before max_tokens", lambda s: s.short or None, _plain, False),
    _Row("rejected (429)", lambda s: s.rejected or None, _plain, False),
]


def print_report(console: Console, results: Results, slo: Slo) -> None:
    for i, level in enumerate(results.levels):
        row = results.row(i)
        if any(cell.samples for cell in row):
            console.print(_table(level, row, slo))
    for cell in results.cells:
        for label, message in _first_failures(cell.samples).items():
            console.print(
                f"{cell.target.name}, {cell.level.label}: {label}: {message}",
                markup=False,
                highlight=False,
            )


def _table(level: Level, row: list[Cell], slo: Slo) -> Table:
    summaries = [summarise(cell.samples, slo) for cell in row]
    first = row[0].target.name
    table = Table(title=level.label, title_justify="left", title_style="bold")
    table.add_column("")
    for cell in row:
        table.add_column(cell.target.name, justify="right")
    for cell in row[1:]:
        table.add_column(f"{cell.target.name} / {first}", justify="right", style="dim")
    for line in _ROWS:
        values = [line.value(summary) for summary in summaries]
        if any(value is not None for value in values):
            ratios = [_ratio(value, values[0]) if line.ratio else "" for value in values[1:]]
            shown = ["–" if value is None else line.show(value) for value in values]
            table.add_row(line.name, *shown, *ratios)
    for label in sorted({label for summary in summaries for label in summary.errors}):
        counts = [str(summary.errors.get(label, 0)) for summary in summaries]
        table.add_row(f"[red]failed: {label}[/]", *counts)
    return table


def _ratio(value: float | None, base: float | None) -> str:
    return "–" if value is None or not base else f"{value / base:.2f}"


def _first_failures(samples: list[RequestSample]) -> dict[str, str]:
    """One message of each kind of failure: the rest are most often the same."""
    found: dict[str, str] = {}
    for sample in samples:
        if sample.failure is not None:
            found.setdefault(sample.failure.label, sample.failure.message)
    return found


def as_json(
    results: Results, slo: Slo, options: dict[str, object], *, samples: bool
) -> dict[str, object]:
    """Everything a run showed; keys stay out of it."""
    return {
        "millrace": __version__,
        "options": options,
        "slo": slo,
        "targets": [{"name": t.name, "url": t.url, "model": t.model} for t in results.targets],
        "levels": [
            {
                "level": level.label,
                "clients": level.clients,
                "rate": level.rate,
                "results": [_cell(cell, slo, samples) for cell in results.row(i)],
            }
            for i, level in enumerate(results.levels)
        ],
    }


def _cell(cell: Cell, slo: Slo, samples: bool) -> dict[str, object]:
    shown: dict[str, object] = {
        "target": cell.target.name,
        "summary": summarise(cell.samples, slo),
        "failures": _first_failures(cell.samples),
    }
    if samples:
        shown["samples"] = cell.samples
    return shown


def write_json(path: Path, value: dict[str, object]) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    except OSError as error:
        raise SetupError(f"--json {path} cannot be written: {error}.") from None
