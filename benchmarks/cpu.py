"""One stream on a CPU beside llama.cpp, from the same GGUF file, in turns.

    python benchmarks/cpu.py --gguf MODEL.gguf --llama FOLDER

FOLDER is one in which `npm i node-llama-cpp --ignore-scripts` has been run. Prompts are token ids drawn at
random, new in every turn; ours go through the HTTP server, with guesses off. Then, with guesses on, text
that repeats itself; the engine's resident memory over the file's size; and, with `--long`, prompts of
8,773, 16,000 and 20,078 tokens beside ones of 1,000. `--clients` adds `millrace bench`'s 8 clients with
prompts of 40 to 900 tokens. `--only` runs some of these parts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from common import HERE, Child, child, free_port, wait_healthy, warn_if_busy
from rich.console import Console

LENGTHS = (230, 2000)
SHORT, LONG = 1000, (8773, 16000, 20078)
OUT = 64
LARGE = 1 << 30
"""Bytes of a file above which memory is held to a multiple of it."""
AT_LEAST, GUESSED_AT_LEAST, MEMORY_AT_MOST, GROWTH_AT_MOST = 0.5, 1.0, 1.5, 3.0


@dataclass(frozen=True)
class Speed:
    prefill: float
    """Prompt tokens a second."""
    decode: float
    """Generated tokens a second, from the first on."""


def main() -> None:
    options = _options()
    console = Console()
    warn_if_busy(console)
    console.print(f"{platform.machine()}, {os.cpu_count()} cores", style="dim")
    with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
        logs = Path(folder)
        for part, measure in _PARTS.items():
            if part in options.only:
                measure(options, console, logs)


def _steady(options: argparse.Namespace, console: Console, logs: Path) -> None:
    """Memory, and speeds without guesses."""
    with ExitStack() as stack:
        theirs = stack.enter_context(_llama(options, logs))
        ours = stack.enter_context(_server(options, logs, "--speculate", "0"))
        # Before the prefix cache has anything: it keeps what prompts leave, within its own budget.
        _ours(ours, [1000] * 40)
        resident = _resident(ours)
        size = options.gguf.stat().st_size
        # The interpreter, MLX and their libraries take as much for any model: of a small file it is most.
        if size > LARGE:
            _verdict(console, "resident over file", resident / size, most=MEMORY_AT_MOST)
        console.print(f"  resident {resident >> 20} MiB, file {size >> 20} MiB", style="dim")
        _plain(options, console, theirs, ours)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama", type=Path, required=True, help="where node-llama-cpp lies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="also prompts of up to 20,078 tokens")
    parser.add_argument("--clients", action="store_true", help="also 8 clients at once")
    parser.add_argument("--only", nargs="+", choices=_PARTS, help="these parts, no others")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.only is None:
        wanted = {"steady": True, "guessed": True, "long": options.long, "clients": options.clients}
        options.only = [part for part, is_wanted in wanted.items() if is_wanted]
    return options


@contextmanager
def _llama(options: argparse.Namespace, logs: Path) -> Iterator[Child]:
    command = ["node", str(HERE / "llama.mjs"), str(options.gguf.resolve()), str(os.cpu_count())]
    here = Path.cwd()
    os.chdir(options.llama)
    try:
        with child("llama.cpp", command, logs=logs, talks=True) as found:
            _line(found)
            yield found
    finally:
        os.chdir(here)


@contextmanager
def _server(options: argparse.Namespace, logs: Path, *more: str) -> Iterator[Child]:
    port = free_port()
    command = [sys.executable, "-m", "millrace", "serve", str(options.gguf.resolve())]
    command += ["--name", "model", "--port", str(port), "--cache-disk", "0", *more]
    # The package of this checkout, wherever the benchmark was started.
    env = {"PYTHONPATH": str(HERE.parent)}
    with child("millrace", command, logs=logs, env=env, port=port) as server:
        wait_healthy(server, 600)
        yield server


def _line(peer: Child) -> dict[str, float]:
    assert peer.process.stdout is not None
    line = peer.process.stdout.readline()
    if not line:
        raise peer.failed("it ended")
    found: dict[str, float] = json.loads(line)
    return found


def _theirs(peer: Child, prompt: list[int]) -> Speed:
    assert peer.process.stdin is not None
    peer.process.stdin.write(json.dumps({"prompt": prompt, "out": OUT}) + "\n")
    peer.process.stdin.flush()
    found = _line(peer)
    return Speed((len(prompt) - 1) / found["prefill"], found["generated"] / found["decode"])


def _ours(server: Child, prompt: list[int] | str, out: int = OUT) -> tuple[Speed, float]:
    """How fast a prompt and its answer went, and seconds to the first token."""
    body = {
        "prompt": prompt,
        "max_tokens": out,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: dict[str, int] = {}
    begin = time.perf_counter()
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=900, trust_env=False) as answer:
        if answer.status_code != 200:
            raise server.failed(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                times.append(time.perf_counter())
    first, last = times[0] - begin, times[-1] - times[0]
    done = usage["completion_tokens"] - 1
    return Speed(usage["prompt_tokens"] / first, done / last if done else 0.0), first


def _plain(options: argparse.Namespace, console: Console, theirs: Child, ours: Child) -> None:
    dice = random.Random(options.seed)
    for length in LENGTHS:
        pairs: list[tuple[Speed, Speed]] = []
        cold = int(length == LENGTHS[0])
        for _ in range(options.rounds + cold):
            prompt = [dice.randrange(300, 30_000) for _ in range(length)]
            pairs.append((_theirs(theirs, prompt), _ours(ours, prompt)[0]))
        del pairs[:cold]
        for what in ("prefill", "decode"):
            them, us = (statistics.median(getattr(p[k], what) for p in pairs) for k in (0, 1))
            name = f"{what}, {length} tokens"
            console.print(f"{name}: llama.cpp {them:.0f}, millrace {us:.0f} tokens/s")
            _verdict(console, name, us / them, least=AT_LEAST)


def _guessed(options: argparse.Namespace, console: Console, logs: Path) -> None:
    """A list that goes on as it began: guesses hold."""
    words = ["red", "green", "blue", "black", "white"]
    text = "\n".join(f"Item {i}: the colour is {words[i % 5]}." for i in range(40))
    pairs = []
    with ExitStack() as stack:
        theirs = stack.enter_context(_llama(options, logs))
        ours = stack.enter_context(_server(options, logs))
        answer = httpx.post(f"{ours.url}/tokenize", json={"prompt": text}, timeout=60)
        tokens = answer.json()["tokens"]
        for turn in range(options.rounds + 1):
            pair = _theirs(theirs, tokens), _ours(ours, tokens, 200)[0]
            if turn:
                pairs.append(pair)
    them, us = (statistics.median(p[k].decode for p in pairs) for k in (0, 1))
    console.print(f"text that repeats itself: llama.cpp {them:.0f}, millrace {us:.0f} tokens/s")
    _verdict(console, "decode with guesses", us / them, least=GUESSED_AT_LEAST)


def _long(options: argparse.Namespace, console: Console, logs: Path) -> None:
    """Long prompts, each between short ones: the machine's own speed may change meanwhile."""
    dice = random.Random(7)
    ratios: dict[int, float] = {}
    with _server(options, logs, "--speculate", "0", "--context", "40000") as ours:

        def per_token(length: int) -> float:
            prompt = [dice.randrange(300, 30_000) for _ in range(length)]
            return _ours(ours, prompt, 2)[1] / length

        per_token(SHORT)
        short = [per_token(SHORT) for _ in range(3)]
        for length in LONG:
            seen = per_token(length)
            before, short = short, [per_token(SHORT) for _ in range(3)]
            ratios[length] = seen / statistics.median(before + short)
            console.print(
                f"a prompt of {length:,} tokens: {seen * length:.1f} s to the first token, "
                f"{ratios[length]:.2f} times as long for each as of {SHORT:,}"
            )
    name = f"time per token at 16,000 over {SHORT:,}"
    _verdict(console, name, ratios[16000], most=GROWTH_AT_MOST)


def _clients(options: argparse.Namespace, console: Console, logs: Path) -> None:
    with _server(options, logs) as ours:
        command = [sys.executable, "-m", "millrace", "bench", "--target", f"millrace={ours.url}"]
        command += ["--clients", "8", "--requests", "64"]
        command += ["--prompt-tokens", "40:900", "--output-tokens", "16:96"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    console.print(done.stdout or done.stderr, highlight=False)


_PARTS = {"steady": _steady, "guessed": _guessed, "long": _long, "clients": _clients}


def _resident(server: Child) -> int:
    pid = httpx.get(f"{server.url}/v1/status", timeout=30).json()["models"][0]["engine_pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) << 10  # type: ignore[union-attr]


def _verdict(
    console: Console, name: str, value: float, *, least: float = 0.0, most: float = float("inf")
) -> None:
    word = "[green]PASS[/]" if least <= value <= most else "[red]FAIL[/]"
    bound = f"at least {least:g}" if least else f"at most {most:g}"
    console.print(f"{word} {name}: {value:.2f} ({bound})", highlight=False)


if __name__ == "__main__":
    main()
