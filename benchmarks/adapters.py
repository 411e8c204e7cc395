"""What adapters cost a decode step of 8 rows: four of rank 8 and rows without, over the same rows bare.

Drives the engine's own batch in this process. The two kinds of step take turns, so that whatever else the
machine does is shared; the ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import default_model, warn_if_busy
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from millrace.errors import MillraceError, SetupError
from millrace.models import blas

if TYPE_CHECKING:
    from millrace.engine.runner import Runner

PROMPT, RANK, AT_MOST = 230, 8, 1.15
SLOTS = (0, 1, 2, 3, 4, 1, 2, 3)
CASES: dict[str, tuple[str, ...]] = {
    "q_proj, v_proj": ("q_proj", "v_proj"),
    "all linear layers": (),
}


@dataclass(frozen=True)
class Cost:
    """Medians over the steps, in seconds."""

    bare: float
    adapted: float

    @property
    def ratio(self) -> float:
        return self.adapted / self.bare


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--weights", default="auto", help="as of millrace serve")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--rows", type=int, default=len(SLOTS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    try:
        costs = _measure(options)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, costs, options)
    if options.json:
        figures = {
            name: {"bare_s": c.bare, "adapted_s": c.adapted, "ratio": c.ratio}
            for name, c in costs.items()
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measure(options: argparse.Namespace) -> dict[str, Cost]:
    found = blas.prepare()  # before anything imports mlx.core
    if found.problem:
        raise SetupError(found.problem)
    from millrace.config import EngineConfig
    from millrace.engine.runner import Runner
    from millrace.models.load import load

    folder = options.model or default_model()
    loaded = load(EngineConfig(model=str(folder), name="bench", weights=options.weights))
    costs = {}
    for name, targets in CASES.items():
        runner = Runner(loaded.model, loaded.caches, recurring=loaded.device != "cpu")
        for slot in range(1, max(SLOTS) + 1):
            runner.adapters.place(slot, _random(runner, targets, options.rank, slot))
        costs[name] = _time(runner, options)
        for slot in sorted(runner.adapters.slots):
            runner.adapters.remove(slot)
    return costs


def _random(runner: Runner, targets: tuple[str, ...], rank: int, seed: int) -> dict[str, Any]:
    import numpy as np

    from millrace.models.adapters.folder import Factors

    dice = np.random.default_rng(seed)
    found = {}
    for name, (inputs, outputs) in runner.adapters.shapes.items():
        if name != "lm_head" and (not targets or name.rsplit(".", 1)[-1] in targets):
            a = dice.standard_normal((inputs, rank), np.float32) / inputs
            found[name] = Factors(a, dice.standard_normal((rank, outputs), np.float32) / rank)
    return found


def _time(runner: Runner, options: argparse.Namespace) -> Cost:
    """Steps of each kind in turns; the first fill memory pools and are not counted."""
    import mlx.core as mx

    from millrace.engine.runner import SequenceRun

    steps, rows = options.steps, options.rows
    slots = [SLOTS[i % len(SLOTS)] for i in range(rows)] if rows > 1 else [1]
    tokens = mx.array([1000 + 37 * i % 4000 for i in range(PROMPT)], mx.int32)
    for row in range(rows):
        runner.begin(row)
        runner.run(tokens, [SequenceRun(row, PROMPT)], [])
    took: dict[bool, list[float]] = {False: [], True: []}
    inputs = mx.array([1000 + row for row in range(rows)], mx.int32)
    runs = [SequenceRun(row, 1) for row in range(rows)]
    for turn in range(2 * (steps + 5)):
        adapted = bool(turn % 2)
        for row, slot in enumerate(slots):
            runner.set_adapter(row, slot if adapted else 0)
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval(runner.run(inputs, runs, range(rows)))
        took[adapted].append(time.perf_counter() - begin)
    for row in range(rows):
        runner.drop(row)
    return Cost(statistics.median(took[False][5:]), statistics.median(took[True][5:]))


def _report(console: Console, costs: dict[str, Cost], options: argparse.Namespace) -> None:
    title = f"A step of {options.rows} rows, adapters of rank {options.rank}, ms"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("adapters change")
    for name in ("none", "adapters", "ratio"):
        table.add_column(name, justify="right")
    for name, cost in costs.items():
        table.add_row(
            name, f"{1000 * cost.bare:.2f}", f"{1000 * cost.adapted:.2f}", f"{cost.ratio:.3f}"
        )
    console.print(table)
    for name, cost in costs.items():
        word = "[green]PASS[/]" if cost.ratio <= AT_MOST else "[red]FAIL[/]"
        console.print(f"{word} {name}: {cost.ratio:.3f} (at most {AT_MOST})", highlight=False)


if __name__ == "__main__":
    main()
