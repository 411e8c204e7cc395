"""What the prefix cache gives and costs: restarts, dropped clients, an agent trace, 8-bit storage.

Parts are chosen with --parts, since all of them take a while. Every server has the same float32
model and our BLAS; those that are compared wait side by side and are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from common import (
    HERE,
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
from prefix_plot import draw
from prefix_restart import PLACES, drop, millrace, restart
from prefix_trace import Replay, conversations, material, summary
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from millrace.bench.load import Wire, closed_loop, make_client
from millrace.bench.plot import check_plot
from millrace.bench.samples import BenchTarget, RequestSample
from millrace.bench.stats import window
from millrace.bench.workload import Item
from millrace.errors import MillraceError, SetupError

PARTS = ("restart", "drop", "trace", "cost", "quant")
OURS, THEIRS, OTHERS = "millrace", "mlx_lm", "vllm-mlx"
COST_CLIENTS, COST_PROMPT, COST_ANSWER = 8, 300, 32


def main() -> None:
    options = _options()
    console = Console()
    found: dict[str, Any] = {"machine": f"{platform.system()} {platform.machine()}"}
    try:
        model = float32_copy(options.model or default_model())
        warn_if_busy(console)
        for part in options.parts:
            with tempfile.TemporaryDirectory(prefix="bench-prefix-") as logs:
                found[part] = _PARTS[part](options, console, model, Path(logs))
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    if options.json:
        found["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of restart, rounds of cost")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=8, help="the most turns of a conversation")
    parser.add_argument("--max-context", type=int, default=6000, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=2, help="tokens of a turn's answer")
    parser.add_argument("--skip", default="", help="servers to leave out of the trace")
    parser.add_argument("--vllm-mlx", type=Path, help="a virtual environment with vllm-mlx")
    parser.add_argument("--plot", type=Path, help="draw the trace to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if options.plot:
        check_plot(options.plot)
    return options


def _restart(options: argparse.Namespace, console: Console, model: Path, logs: Path) -> Any:
    found = restart(model, logs, options.rounds, options.seed)
    table = Table(
        title=f"Seconds to the first token of a prompt of {min(found.tokens):,} to "
        f"{max(found.tokens):,} tokens, median of {len(found.tokens)}",
        title_justify="left",
        box=SIMPLE,
    )
    for column in ("state", "seconds", "over cold", "tokens run"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for place in PLACES:
        run = found.run[place]
        runs = str(run[0]) if len(set(run)) == 1 else f"{min(run)} to {max(run)}"
        table.add_row(place, f"{found.median(place):.3f}", f"{found.ratio(place):.3f}", runs)
    console.print(table)
    for place in PLACES[2:]:
        _verdict(console, found.ratio(place) <= 0.2, f"{place}: {found.ratio(place):.3f} of cold "
                 "(at most 0.2)")  # fmt: skip
    return asdict(found)


def _drop(options: argparse.Namespace, console: Console, model: Path, logs: Path) -> Any:
    found = drop(model, logs, options.seed)
    share = found.again / found.tokens
    console.print(
        f"A prompt of {found.tokens:,} tokens, left at {found.at:,}; the second request ran "
        f"{found.again:,}.",
        highlight=False,
    )
    _verdict(console, share <= 0.6, f"run again: {share:.3f} of the prompt (at most 0.6)")
    return asdict(found)


def _trace(options: argparse.Namespace, console: Console, model: Path, logs: Path) -> Any:
    talks = conversations(options.conversations)
    replay = Replay(model, options.max_context, options.turns, options.max_tokens)
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        servers = _servers(stack, options, model, logs)
        turns = replay.run(servers, talks, progress)
    table = Table(
        title=f"{len(talks)} conversations, turns after the first (prompt, new, run: tokens)",
        title_justify="left",
        box=SIMPLE,
    )
    columns = ("server", "turns", "prompt", "new", "run", "run/new", "TTFT p50", "p90")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column == "server" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for server in servers:
        s = summary([t for t in turns if t.server == server.name])
        run = "not told" if s.run_tokens is None else f"{s.run_tokens:,}"
        ratio = "" if s.ratio is None else f"{s.ratio:.3f}"
        table.add_row(server.name, str(s.turns), f"{s.prompt_tokens:,}", f"{s.new_tokens:,}", run,
                      ratio, f"{s.median:.2f} s", f"{s.p90:.2f} s")  # fmt: skip
    console.print(table)
    ours = summary([t for t in turns if t.server == OURS])
    if ours.ratio is not None:
        _verdict(console, ours.ratio <= 1.02, f"run / new: {ours.ratio:.4f} (at most 1.02)")
    if options.plot:
        draw(options.plot, turns, "SmolLM2-135M" if options.model is None else model.name)
    return [asdict(t) for t in turns]


def _servers(stack: ExitStack, options: argparse.Namespace, model: Path, logs: Path) -> list[Child]:
    blas = with_blas(our_blas())
    ours, port = millrace(model, logs / "disk")
    commands = {OURS: (ours, port, {})}
    port = free_port()
    python = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    commands[THEIRS] = ([*python, "--port", str(port)], port, blas)
    if options.vllm_mlx:
        port = free_port()
        serve = [str(options.vllm_mlx / "bin" / "vllm-mlx"), "serve", str(model)]
        name = ["--served-model-name", "default_model", "--continuous-batching"]
        # A home of its own: it would find there what an earlier run has kept.
        env = blas | {"HOME": str(logs)}
        commands[OTHERS] = ([*serve, *name, "--port", str(port)], port, env)
    servers = []
    for name, (command, port, env) in commands.items():
        if name not in options.skip.split(","):
            server = stack.enter_context(child(name, command, logs=logs, env=env, port=port))
            _wait(server)
            servers.append(server)
    return servers


def _wait(server: Child) -> None:
    """Until it answers; what /health says is not everywhere the same."""
    if server.name != OTHERS:
        wait_healthy(server)
        return
    import httpx

    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{server.url}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise server.failed("not ready after 180 s.")


def _cost(options: argparse.Namespace, console: Console, model: Path, logs: Path) -> Any:
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    with ExitStack() as stack:
        servers = {}
        for name, more in (("on", ()), ("off", ("--no-cache",))):
            command, port = millrace(model, logs / "disk", *more)
            servers[name] = stack.enter_context(child(name, command, logs=logs, port=port))
            wait_healthy(servers[name])
        for number in range(options.rounds + 1):
            order = ("on", "off") if number % 2 else ("off", "on")
            for name in order:
                stream = f"cost {number} {name}"
                items = prompts(COST_CLIENTS, COST_PROMPT, COST_ANSWER, options.seed, stream)
                speed = asyncio.run(_wave(servers[name], items))
                if number:  # the first round is a warm-up
                    speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = [a / b for a, b in zip(speeds["on"], speeds["off"], strict=True)]
    ratio = statistics.median(ratios)
    console.print(
        f"{COST_CLIENTS} clients, prompts that nobody sent before: {medians['on']:.1f} tokens/s "
        f"with the cache, {medians['off']:.1f} without; ratios of the rounds "
        + ", ".join(f"{r:.3f}" for r in ratios)
        + ".",
        highlight=False,
    )
    _verdict(console, ratio >= 0.97, f"with / without: {ratio:.3f} (at least 0.97)")
    return speeds


async def _wave(server: Child, items: list[Item]) -> float:
    samples: list[RequestSample] = []
    target = BenchTarget(name=server.name, url=f"{server.url}/v1", model="default_model")
    async with make_client() as http:
        await closed_loop(
            http,
            target,
            Wire(endpoint="completions", timeout=900),
            items,
            clients=len(items),
            number=0,
            record=samples.append,
        )
    for sample in samples:
        if sample.failure is not None:
            raise server.failed(f"{sample.failure.label}: {sample.failure.message}")
    return sum(s.tokens for s in samples) / window(samples)


def _quant(options: argparse.Namespace, console: Console, model: Path, logs: Path) -> Any:
    text = logs / "text"
    with gzip.open(material("tinyshakespeare.txt.gz"), "rt", encoding="utf-8") as stored:
        text.write_text(stored.read(), encoding="utf-8")
    command = [sys.executable, str(HERE / "prefix_quant.py"), str(model), str(text)]
    done = subprocess.run([*command, "8", "1024", "256"], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"The comparison failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    console.print(
        f"8-bit storage, {found['passages']} passages of Shakespeare, 1,024 tokens restored and "
        f"256 scored: |Δ logprob| mean {found['mean']:.4f}, p99 {found['p99']:.4f}, max "
        f"{found['max']:.4f}; perplexity {found['perplexity']:.4f} → "
        f"{found['perplexity_packed']:.4f}; same first choice "
        f"{100 * found['same_first_choice']:.2f} %; {found['bytes_per_token']:,.0f} → "
        f"{found['bytes_per_token_packed']:,.0f} bytes a token.",
        highlight=False,
    )
    return found


_PARTS = {"restart": _restart, "drop": _drop, "trace": _trace, "cost": _cost, "quant": _quant}


def _verdict(console: Console, passed: bool, text: str) -> None:
    word = "[green]PASS[/]" if passed else "[red]FAIL[/]"
    console.print(f"{word} {text}", highlight=False)


if __name__ == "__main__":
    main()
