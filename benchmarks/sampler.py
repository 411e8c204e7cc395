"""The sampler's share of a decode step at batch 16, with every row asking for something else.

Drives the engine's own batch in this process: a step is a forward pass, waited for, and a draw,
read by the host. One table tells the share with mixed parameters, which has a target, and what each
parameter costs when all rows ask for it.
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
from rich.progress import track
from rich.table import Table

from millrace.errors import MillraceError, SetupError
from millrace.models import blas
from millrace.protocol import Choice, Sampling, Submit

if TYPE_CHECKING:
    from millrace.engine.batch import Batch

ROWS, PROMPT, AT_MOST = 16, 230, 0.05
MIXED = (
    Sampling(0.0),
    Sampling(0.0, logit_bias={28: 4.0, 30: -100.0}),
    Sampling(0.0, repetition_penalty=1.3),
    Sampling(0.0, frequency_penalty=1.5, presence_penalty=0.5),
    Sampling(1.0, top_k=1),
    Sampling(1.0),
    Sampling(0.7, top_p=0.9),
    Sampling(1.3, top_k=40),
    Sampling(1.5, min_p=0.1),
    Sampling(1.0, typical_p=0.8),
    Sampling(1.0, xtc_probability=0.8, xtc_threshold=0.05),
    Sampling(0.9, min_tokens=10_000),
    Sampling(1.0, presence_penalty=1.0, top_p=0.95, top_k=50),
    Sampling(0.5, repetition_penalty=1.1, min_p=0.02),
    Sampling(0.8, top_p=0.7, frequency_penalty=0.5),
    Sampling(1.0, logit_bias={198: 6.0}),
)
CASES: dict[str, tuple[Sampling, ...]] = {
    "mixed": MIXED,
    "mixed, without typical_p": tuple(
        s if s.typical_p == 1.0 else Sampling(1.0, top_p=0.9) for s in MIXED
    ),
    "greedy": (Sampling(0.0),),
    "temperature": (Sampling(1.0),),
    "top_p 0.9": (Sampling(1.0, top_p=0.9),),
    "top_k 40": (Sampling(1.0, top_k=40),),
    "min_p 0.1": (Sampling(1.0, min_p=0.1),),
    "typical_p 0.8": (Sampling(1.0, typical_p=0.8),),
    "xtc": (Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.05),),
    "greedy, penalties": (Sampling(0.0, repetition_penalty=1.2, presence_penalty=0.5),),
    "greedy, logit_bias": (Sampling(0.0, logit_bias={28: 1.0, 30: -1.0}),),
}


@dataclass(frozen=True)
class Cost:
    """Medians over the steps, in seconds."""

    forward: float
    draw: float

    @property
    def share(self) -> float:
        return self.draw / (self.forward + self.draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    try:
        costs = _measure(options)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, costs)
    if options.json:
        figures = {
            name: {"forward_s": c.forward, "draw_s": c.draw, "share": c.share}
            for name, c in costs.items()
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measure(options: argparse.Namespace) -> dict[str, Cost]:
    found = blas.prepare()  # before anything imports mlx.core
    if found.problem:
        raise SetupError(found.problem)
    from millrace.config import EngineConfig
    from millrace.models.load import load

    folder = options.model or default_model()
    loaded = load(EngineConfig(model=str(folder), name="bench"))
    cases = [options.only] if options.only else list(CASES)
    costs = {}
    for name in track(cases, "measuring", transient=True):
        batch = _batch(loaded.model, loaded.device, CASES[name])
        costs[name] = _time(batch, options.steps)
    return costs


def _prompt() -> list[int]:
    return [1000 + 37 * i % 4000 for i in range(PROMPT)]


def _batch(model: Any, device: str, params: tuple[Sampling, ...]) -> Batch:
    import mlx.core as mx

    from millrace.engine.batch import Batch
    from millrace.engine.row import Row
    from millrace.engine.runner import Runner, SequenceRun
    from millrace.engine.sampler import Sampler
    from millrace.engine.sampling import DeviceSampling, HostSampling

    runner = Runner(model, recurring=device != "cpu")
    batch = Batch(runner, Sampler(HostSampling() if device == "cpu" else DeviceSampling()))
    prompt = mx.array(_prompt()[:-1], mx.int32)
    runner.begin(0)
    runner.run(prompt, [SequenceRun(0, len(prompt))], [])
    rows = [
        Row.of(
            Submit(i, _prompt(), [], 10_000, params[i % len(params)], stop_ids=[2]), Choice(0, i)
        )
        for i in range(ROWS)
    ]
    batch.join(0, rows, _prompt())
    return batch


def _time(batch: Batch, steps: int) -> Cost:
    """The first steps fill memory pools and are not counted."""
    import mlx.core as mx

    forwards, draws = [], []
    for _ in range(steps + 5):
        begin = time.perf_counter()
        batch.forward([])
        mx.synchronize()
        middle = time.perf_counter()
        batch.sample()
        for drawn in batch.read():
            drawn.row.accept(drawn.tokens[0])
        draws.append(time.perf_counter() - middle)
        forwards.append(middle - begin)
    return Cost(statistics.median(forwards[5:]), statistics.median(draws[5:]))


def _report(console: Console, costs: dict[str, Cost]) -> None:
    table = Table(title=f"A step of {ROWS} rows, ms", title_justify="left", box=SIMPLE)
    table.add_column("parameters of the rows")
    for name in ("forward", "draw", "draw's share"):
        table.add_column(name, justify="right")
    for name, cost in costs.items():
        table.add_row(
            name, f"{1000 * cost.forward:.1f}", f"{1000 * cost.draw:.2f}", f"{cost.share:.1%}"
        )
    console.print(table)
    if mixed := costs.get("mixed"):
        word = "[green]PASS[/]" if mixed.share <= AT_MOST else "[red]FAIL[/]"
        console.print(
            f"{word} mixed: the draw is {mixed.share:.1%} of a step (at most {AT_MOST:.0%})",
            highlight=False,
        )


if __name__ == "__main__":
    main()
