"""`make bench-core`: generated tokens per second of millrace beside raw mlx-lm and mlx_lm.server.

All contenders have the same float32 model folder and the same prompts, wait in processes of their
own, and are measured one at a time in rounds that alternate. A wave is N prompts sent at once and
lasts until the last has ended. The table shows the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import (
    Child,
    child,
    default_model,
    float32_copy,
    free_port,
    our_blas,
    prompts,
    wait_healthy,
    warn_if_busy,
    with_blas,
)
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from millrace.bench.load import Wire, closed_loop, make_client
from millrace.bench.samples import BenchTarget, RequestSample
from millrace.bench.stats import window
from millrace.bench.workload import Item
from millrace.errors import MillraceError, SetupError

OURS, PLAIN, RAW, STOCK, TUNED = "millrace", "plain", "raw", "stock", "blas"
TITLES = {
    OURS: "millrace",
    PLAIN: "millrace, no guesses",
    RAW: "raw",
    STOCK: "mlx_lm stock",
    TUNED: "mlx_lm our BLAS",
}
PROMPT_TOKENS, OUTPUT_TOKENS = 230, 48
CLIENTS = (1, 4, 16)
ROUNDS = {1: 5, 4: 5, 16: 3}
QUICK = {1: 2, 4: 2, 16: 1}
# With its reference BLAS one wave of four takes minutes: it is measured once, where it counts.
STOCK_ROUNDS = {4: 1}
TARGETS = [(RAW, 1, 0.95), (RAW, 4, 0.95), (RAW, 16, 0.95), (STOCK, 4, 8.0), (TUNED, 4, 1.2)]


@dataclass(frozen=True)
class Wave:
    """N prompts sent at once, from the first start to the last end."""

    seconds: float
    tokens: list[int]
    prompt_tokens: list[int]

    @property
    def speed(self) -> float:
        return sum(self.tokens) / self.seconds


Measure = Callable[[list[Item]], Wave]


@dataclass
class Measured:
    """Waves by contender and number of clients."""

    waves: dict[tuple[str, int], list[Wave]] = field(default_factory=lambda: defaultdict(list))

    def speed(self, name: str, clients: int) -> float | None:
        waves = self.waves.get((name, clients))
        return statistics.median(wave.speed for wave in waves) if waves else None

    def ratio(self, over: str, clients: int) -> float | None:
        ours, theirs = self.speed(OURS, clients), self.speed(over, clients)
        return ours / theirs if ours is not None and theirs else None


def main() -> None:
    options = _options()
    console = Console()
    try:
        measured = _run(options, console)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, measured)
    if options.json:
        options.json.write_text(json.dumps(_as_json(measured), indent=2) + "\n")
        console.print(f"Figures: {options.json}", highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help="the same number of rounds at every level")
    parser.add_argument("--clients", default="1,4,16", help="levels, of 1,4,16")
    parser.add_argument("--skip", default="", help=f"contenders to leave out: {', '.join(TITLES)}")
    parser.add_argument("--plain", action="store_true", help="also run millrace --speculate 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all waves to this file")
    options = parser.parse_args()
    options.clients = [int(n) for n in options.clients.split(",")]
    options.skip = {name for name in options.skip.split(",") if name}
    if not options.plain:
        options.skip.add(PLAIN)
    if unknown := options.skip - TITLES.keys():
        parser.error(f"--skip knows {', '.join(TITLES)}, not {', '.join(sorted(unknown))}")
    if not set(options.clients) <= set(CLIENTS):
        parser.error("--clients takes 1, 4 and 16")
    return options


def _run(options: argparse.Namespace, console: Console) -> Measured:
    blas = our_blas()
    model = float32_copy(options.model or default_model())
    console.print(f"Model: {model.name}. Our BLAS: {Path(blas).name if blas else 'none needed'}.")
    warn_if_busy(console)
    with tempfile.TemporaryDirectory(prefix="bench-core-") as logs, ExitStack() as stack:
        contenders = _start(stack, model, blas, Path(logs), options.skip)
        turns = _turns(options, list(contenders))
        measured = Measured()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("warm-up", total=len(turns))
            for measure in contenders.values():
                measure(prompts(1, 40, 4, options.seed, "warm-up"))
            for name, clients, number in turns:
                progress.update(bar, description=f"clients {clients} · {TITLES[name]}")
                stream = f"{clients}/{number}"
                items = prompts(clients, PROMPT_TOKENS, OUTPUT_TOKENS, options.seed, stream)
                try:
                    measured.waves[name, clients].append(contenders[name](items))
                except MillraceError as error:
                    if name in (OURS, RAW):
                        raise
                    console.print(f"[yellow]left out:[/] {error.message.splitlines()[0]}")
                progress.advance(bar)
    return measured


def _turns(options: argparse.Namespace, names: list[str]) -> list[tuple[str, int, int]]:
    """(contender, clients, round) in order: rounds alternate, each starting one further on."""
    turns = []
    for clients in options.clients:
        rounds = options.rounds or (QUICK if options.quick else ROUNDS)[clients]
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name != STOCK or number < STOCK_ROUNDS.get(clients, 0):
                    turns.append((name, clients, number))
    return turns


def _start(
    stack: ExitStack, model: Path, blas: str | None, logs: Path, skip: set[str]
) -> dict[str, Measure]:
    """Starts every contender; those without work wait idle."""
    contenders: dict[str, Measure] = {}
    python = [sys.executable, "-m"]
    ours = [*python, "millrace", "serve", str(model), "--name", "bench", "--cache-disk", "0"]
    servers = {
        OURS: (ours, {}, "bench"),
        PLAIN: ([*ours, "--speculate", "0"], {}, "bench"),
        STOCK: ([*python, "mlx_lm", "server", "--model", str(model)], {}, "default_model"),
        TUNED: (
            [*python, "mlx_lm", "server", "--model", str(model)],
            with_blas(blas),
            "default_model",
        ),
    }
    if RAW not in skip:
        command = [sys.executable, str(Path(__file__).with_name("raw.py")), str(model)]
        worker = stack.enter_context(
            child(TITLES[RAW], command, logs=logs, env=with_blas(blas), talks=True)
        )
        contenders[RAW] = lambda items: _raw_wave(worker, items)
    for name, (command, env, served) in servers.items():
        if name not in skip:
            port = free_port()
            command = [*command, "--port", str(port)]
            server = stack.enter_context(
                child(TITLES[name], command, logs=logs, env=env, port=port)
            )
            wait_healthy(server)
            contenders[name] = _server_measure(server, served)
    return contenders


def _raw_wave(worker: Child, items: list[Item]) -> Wave:
    wanted, given = worker.process.stdin, worker.process.stdout
    if wanted is None or given is None:
        raise worker.failed("has no pipes.")
    order = {"prompts": [item.prompt for item in items], "max_tokens": items[0].max_tokens}
    try:
        wanted.write(json.dumps(order) + "\n")
        wanted.flush()
    except BrokenPipeError:
        raise worker.failed("ended early.") from None
    line = given.readline()
    if not line:
        raise worker.failed("ended early.")
    return Wave(**json.loads(line))


def _server_measure(server: Child, model: str) -> Measure:
    target = BenchTarget(name=server.name, url=f"{server.url}/v1", model=model)
    wire = Wire(endpoint="completions", timeout=900)

    async def wave(items: list[Item]) -> list[RequestSample]:
        samples: list[RequestSample] = []
        async with make_client() as http:
            await closed_loop(
                http, target, wire, items, clients=len(items), number=0, record=samples.append
            )
        return samples

    def measure(items: list[Item]) -> Wave:
        samples = asyncio.run(wave(items))
        for sample in samples:
            if sample.failure is not None:
                raise server.failed(f"{sample.failure.label}: {sample.failure.message}")
            if sample.completion_tokens is None:
                raise SetupError(f"{server.name} sent no usage, so its tokens cannot be counted.")
        return Wave(
            window(samples),
            [sample.tokens for sample in samples],
            [sample.prompt_tokens or 0 for sample in samples],
        )

    return measure


def _report(console: Console, measured: Measured) -> None:
    names = [name for name in TITLES if any(name == key[0] for key in measured.waves)]
    others = [name for name in names if name != OURS and OURS in names]
    table = Table(title="Generated tokens/s, median of rounds", title_justify="left", box=SIMPLE)
    table.add_column("clients", justify="right")
    for name in names:
        table.add_column("ours" if name == OURS else TITLES[name], justify="right")
    for name in others:
        table.add_column(f"ours / {TITLES[name]}", justify="right", style="bold")
    for clients in sorted({clients for _, clients in measured.waves}):
        speeds = [_number(measured.speed(name, clients), 1) for name in names]
        ratios = [_number(measured.ratio(name, clients), 2) for name in others]
        table.add_row(str(clients), *speeds, *ratios)
    console.print(table)
    console.print(
        "raw: mlx-lm's BatchGenerator alone, our BLAS. mlx_lm: its server, "
        "with the BLAS of its wheel (stock) or ours.",
        highlight=False,
    )
    for over, clients, least in TARGETS:
        ratio = measured.ratio(over, clients)
        if ratio is not None:
            word = "[green]PASS[/]" if ratio >= least else "[red]FAIL[/]"
            console.print(
                f"{word} ours / {TITLES[over]}, clients {clients}: {ratio:.2f} "
                f"(at least {least:g})",
                highlight=False,
            )
    waves = [wave for group in measured.waves.values() for wave in group]
    generated = [tokens for wave in waves for tokens in wave.tokens]
    sent = [tokens for wave in waves for tokens in wave.prompt_tokens]
    if generated:
        console.print(
            f"{len(generated)} requests: prompts of {min(sent)} to {max(sent)} tokens, "
            f"{min(generated)} to {max(generated)} generated; "
            f"{sum(n < OUTPUT_TOKENS for n in generated)} ended before {OUTPUT_TOKENS}.",
            highlight=False,
        )


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _as_json(measured: Measured) -> dict[str, object]:
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "levels": [
            {
                "contender": TITLES[name],
                "clients": clients,
                "tokens_per_s": measured.speed(name, clients),
                "millrace_over_it": measured.ratio(name, clients),
                "waves": [asdict(wave) for wave in waves],
            }
            for (name, clients), waves in measured.waves.items()
        ],
    }


if __name__ == "__main__":
    main()
