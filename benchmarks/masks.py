"""What a grammar costs: the decode step of eight structured rows over that of eight plain ones.

Drives the engine in this process. Both batches have the same prompt and sampling and take turns, so
that noise of the machine hits them alike; guessing ahead is off, since structured rows do not guess.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import default_model, warn_if_busy
from rich.console import Console

from millrace.errors import MillraceError, SetupError
from millrace.models import blas
from millrace.protocol import Choice, FromEngine, Sampling, Step, Submit

ROWS, MADE, AT_MOST = 8, 40, 1.15
SCHEMA = {
    "type": "array",
    "minItems": 20,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 8},
            "kind": {"enum": ["tree", "river", "stone"]},
            "size": {"type": "integer", "minimum": 3, "maximum": 9000},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}


class Steps:
    """An engine, and how long its steps took."""

    def __init__(self, loaded: Any, folder: Path) -> None:
        from millrace.config import EngineConfig
        from millrace.engine.assembly import assemble
        from millrace.engine.grammar import Grammars
        from millrace.engine.memory import Budget
        from millrace.engine.runner import Runner
        from millrace.engine.sampler import Sampler
        from millrace.engine.sampling import DeviceSampling, HostSampling
        from millrace.engine.transport import ThreadTransport

        self.seconds: list[float] = []
        self._transport = ThreadTransport(self._receive)
        backend = HostSampling() if loaded.device == "cpu" else DeviceSampling()
        on_cpu = loaded.device == "cpu"
        runner = Runner(loaded.model, loaded.caches, recurring=not on_cpu)
        self._engine = assemble(
            runner,
            EngineConfig(model=str(folder), name="bench", speculate=0, max_stall=60.0),
            Sampler(backend),
            Budget(runner.cost, 1 << 34),
            self._transport,
            pipelined=not on_cpu,
            grammars=Grammars(folder, loaded.vocab_size),
        )

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Step) and len(message.rows) == ROWS and message.seconds:
            self.seconds.append(message.seconds)

    def run(self, prompt: list[int], grammar: str | None, ends: list[int]) -> float:
        """The median step of one batch."""
        self.seconds.clear()
        for i in range(ROWS):
            choice = [Choice(0, i)]
            sampling = Sampling(temperature=1.0, top_p=0.95)
            self._transport.put(
                Submit(i, prompt, choice, MADE, sampling, grammar=grammar, end_ids=ends)
            )
        self._engine.turn()
        while self._engine.busy:
            self._engine.turn()
        return statistics.median(self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    console = Console(highlight=False)
    warn_if_busy(console)
    try:
        plain, bound = _measure(options)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}")
        sys.exit(1)
    ratio = statistics.median(bound) / statistics.median(plain)
    word = "[green]PASS[/]" if ratio <= AT_MOST else "[red]FAIL[/]"
    console.print(
        f"{word} step of {ROWS} structured rows {1000 * statistics.median(bound):.1f} ms over "
        f"{1000 * statistics.median(plain):.1f} ms of plain ones: {ratio:.3f} (at most {AT_MOST})"
    )
    if options.json:
        figures = {"plain_s": plain, "structured_s": bound, "ratio": ratio}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measure(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    found = blas.prepare()  # before anything imports mlx.core
    if found.problem:
        raise SetupError(found.problem)
    from millrace.config import EngineConfig
    from millrace.models.load import load
    from millrace.text.grammar import from_schema
    from millrace.text.grammar.lark import single
    from millrace.text.tokenizer import Tokenizer

    folder = options.model or default_model()
    loaded = load(EngineConfig(model=str(folder), name="bench"))
    tokenizer = Tokenizer(folder)
    grammar = single(from_schema(SCHEMA, "schema"))
    prompt = tokenizer.encode("Here is a long list of things that I saw in the forest:\n")
    ends = sorted(tokenizer.eos_ids)
    steps = Steps(loaded, folder)
    plain: list[float] = []
    bound: list[float] = []
    for _ in range(options.rounds):
        plain.append(steps.run(prompt, None, ends))
        bound.append(steps.run(prompt, grammar, ends))
    return plain, bound


if __name__ == "__main__":
    main()
