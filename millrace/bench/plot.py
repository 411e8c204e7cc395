"""The picture of a run: TTFT and inter-token CDFs for every level, and throughput bars.

matplotlib is optional and imported only here, when a plot is asked for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.bench.samples import Results
from millrace.bench.stats import Slo, percentile, summarise
from millrace.errors import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg")
# Beyond this ratio between high and low values a linear axis hides one of the targets.
_LOG_FROM = 30
_COLOURS = ("#1f6f8b", "#e07a1f", "#5b8c3a", "#9b3f73", "#6b6b6b", "#c9a227")


def check_plot(path: Path) -> None:
    """Fails before a long run rather than after it."""
    if path.suffix.lower() not in _SUFFIXES:
        raise SetupError(f"--plot {path}: the name must end in .png or .svg.")
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError(
            "--plot needs matplotlib; install it with: pip install 'millrace-server[plot]'"
        )


def draw(path: Path, results: Results) -> None:
    """Writes the plot, in the format its suffix names."""
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = len(results.levels)
    figure = Figure(figsize=(13, 1.2 + 2.9 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 3, width_ratios=(1, 1, 0.9))
    for i, level in enumerate(results.levels):
        cells = results.row(i)
        ttft = [[s.ttft for s in c.samples if s.ok and s.ttft is not None] for c in cells]
        gaps = [[gap for s in c.samples if s.ok for gap in s.gaps] for c in cells]
        names = [c.target.name for c in cells]
        _cdf(figure.add_subplot(grid[i, 0]), f"Time to first token, {level.label}", names, ttft)
        _cdf(figure.add_subplot(grid[i, 1]), f"Gap between tokens, {level.label}", names, gaps)
    bars = figure.add_subplot(grid[:, 2])
    _bars(bars, results)
    handles, names = bars.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SetupError(f"--plot {path} cannot be written: {error}.") from None


def _cdf(axes: Axes, title: str, names: list[str], series: list[list[float]]) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    everything = sorted(value for values in series for value in values if value > 0)
    unit, scale = ("s", 1.0) if everything and everything[-1] >= 10 else ("ms", 1000.0)
    for i, (name, values) in enumerate(zip(names, series, strict=True)):
        ordered = sorted(value * scale for value in values)
        if not ordered:
            continue
        shares = [(n + 1) / len(ordered) for n in range(len(ordered))]
        axes.step(
            [ordered[0], *ordered], [0.0, *shares], where="post", label=name, color=_colour(i)
        )
    if everything and percentile(everything, 0.98) / percentile(everything, 0.02) > _LOG_FROM:
        _log_axis(axes)
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of requests" if "first" in title else "share of gaps")
    _tidy(axes)


def _bars(axes: Axes, results: Results) -> None:
    axes.set_title("Generated tokens per second", fontsize=10, loc="left")
    width = 0.8 / len(results.targets)
    for t, target in enumerate(results.targets):
        speeds = [
            summarise(results.row(i)[t].samples, Slo()).tokens_per_s
            for i in range(len(results.levels))
        ]
        places = [i + (t - (len(results.targets) - 1) / 2) * width for i in range(len(speeds))]
        bars = axes.bar(places, speeds, width * 0.92, label=target.name, color=_colour(t))
        labels: list[Any] = [f"{speed:.3g}" for speed in speeds]
        axes.bar_label(bars, labels=labels, fontsize=8, padding=2)
    axes.set_xticks(range(len(results.levels)), [level.label for level in results.levels])
    axes.margins(y=0.1)
    _tidy(axes)


def _log_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _tidy(axes: Axes) -> None:
    axes.grid(axis="both", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
