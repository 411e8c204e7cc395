"""The plot of the agent trace: waiting time and tokens run, turn by turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefix_trace import Turn

from millrace.errors import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f6f8b", "#e07a1f", "#9b3f73")


def draw(path: Path, turns: Sequence[Turn], model: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(t.server for t in turns))
    count = len({t.conversation for t in turns})
    for name, colour in zip(names, COLOURS, strict=False):
        own = [t for t in turns if t.server == name]
        _lines(above, own, name, colour, lambda t: t.seconds)
        if all(t.run_tokens is not None for t in own):
            _lines(below, own, f"run by {name}", colour, lambda t: float(t.run_tokens or 0))
    mine = [t for t in turns if t.server == names[0]]
    for label, style, value in (
        ("the whole prompt", ":", lambda t: float(t.prompt_tokens)),
        ("new since the last turn", "--", lambda t: float(t.new_tokens)),
    ):
        _middle(below, mine, label, "#3a3a3a", style, value)
    figure.suptitle(f"{count} agent conversations (tau-bench), turn by turn, {model}", fontsize=11)
    above.set_ylabel("seconds to the first token")
    below.set_ylabel("prompt tokens")
    below.set_xlabel("turn of the conversation (thick: the middle one of all; thin: each)")
    for axes in (above, below):
        axes.set_yscale("log")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    below.set_xticks(range(1, 1 + max(t.number for t in turns) + 1))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SetupError(f"--plot {path} cannot be written: {error}.") from None


Value = Callable[[Turn], float]


def _lines(axes: Axes, turns: Sequence[Turn], label: str, colour: str, value: Value) -> None:
    for conversation in sorted({t.conversation for t in turns}):
        own = [t for t in turns if t.conversation == conversation]
        axes.plot(
            [t.number + 1 for t in own], list(map(value, own)), color=colour, lw=0.6, alpha=0.3
        )
    _middle(axes, turns, label, colour, "-", value)


def _middle(
    axes: Axes, turns: Sequence[Turn], label: str, colour: str, style: str, value: Value
) -> None:
    numbers = sorted({t.number for t in turns})
    middles = [statistics.median(value(t) for t in turns if t.number == n) for n in numbers]
    axes.plot([n + 1 for n in numbers], middles, style, color=colour, lw=2, label=label)
