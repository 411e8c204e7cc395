"""Several models under a memory limit that holds some of them, asked for at random over all protocols.

    python benchmarks/models.py MODEL MODEL MODEL --holds 2 --requests 300 --clients 8

Held to: no request fails, no model in use is unloaded, no load but for somebody who asks, and the memory
of the engines' processes, sampled all the while, stays below the limit. Encoders are asked for
embeddings, all others for text.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import Child, child, free_port
from rich.console import Console
from rich.table import Table

from millrace.config import EngineConfig
from millrace.models.footprint import in_words
from millrace.models.resolve import resolve
from millrace.models.window import read_config
from millrace.serving.catalogue import ModelSpec
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace

PATIENCE = 240.0
KV, CACHE = 64 << 20, 32 << 20
_STATE = ("--kv-memory", str(KV), "--cache-memory", str(CACHE), "--cache-disk", "0")
_SAYS = [{"role": "user", "content": "Say a word."}]


def text_requests(name: str, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/v1/chat/completions", {"messages": _SAYS, "max_tokens": tokens}),
        ("/v1/chat/completions", {"messages": _SAYS, "max_tokens": tokens, "stream": True}),
        ("/v1/completions", {"prompt": "One, two,", "max_tokens": tokens}),
        ("/v1/responses", {"input": "Say a word.", "max_output_tokens": tokens}),
        ("/v1/responses", {"input": "Say it.", "max_output_tokens": tokens, "stream": True}),
        ("/v1/messages", {"messages": _SAYS, "max_tokens": tokens}),
        ("/v1/messages", {"messages": _SAYS, "max_tokens": tokens, "stream": True}),
        ("/generate", {"text": "One, two,", "sampling_params": {"max_new_tokens": tokens}}),
        ("/api/chat", {"messages": _SAYS, "options": {"num_predict": tokens}}),
        ("/api/generate", {"prompt": "Say a word.", "options": {"num_predict": tokens}}),
    ]


def encoder_requests() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/v1/embeddings", {"input": ["a few", "short texts"]}),
        ("/api/embed", {"input": ["a few", "short texts"]}),
    ]


@dataclass
class Found:
    answered: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Bytes of all engines, as sampled."""
    front: int = 0


async def client(
    http: httpx.AsyncClient,
    asks: dict[str, list[tuple[str, dict[str, Any]]]],
    left: Any,
    seed: int,
    found: Found,
) -> None:
    draw = random.Random(seed)
    for _ in left:
        name = draw.choice(sorted(asks))
        path, body = draw.choice(asks[name])
        try:
            answer = await http.post(path, json={"model": name, **body})
        except httpx.HTTPError as error:
            found.failures.append(f"{path} of {name}: {error!r}")
            continue
        if answer.status_code != 200 or '"error":{' in answer.text:
            found.failures.append(f"{path} of {name}: {answer.status_code} {answer.text[:200]}")
        else:
            found.answered[f"{name} {path}"] += 1


async def sample(server: Child, found: Found) -> None:
    while True:
        sizes = {pid: _resident(pid) for pid in _family(server.process.pid)}
        found.front = max(found.front, sizes.pop(server.process.pid, 0))
        found.memory.append(sum(sizes.values()))
        await asyncio.sleep(0.05)


def _family(root: int) -> list[int]:
    found = [root]
    for parent in found:
        try:
            file = Path(f"/proc/{parent}/task/{parent}/children")
            found += [int(pid) for pid in file.read_text().split()]
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    """What is the process's own, and its part of what it shares."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return (
        int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) * 1024
    )


async def measure(server: Child, names: list[str], options: argparse.Namespace) -> Found:
    found = Found()
    asks = {
        name: encoder_requests() if name in options.encoders else text_requests(name, 8)
        for name in names
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        await _ready(http, server)
        sampling = asyncio.create_task(sample(server, found))
        left = iter(range(options.requests))
        await asyncio.gather(
            *(client(http, asks, left, options.seed + n, found) for n in range(options.clients))
        )
        sampling.cancel()
        status = (await http.get("/v1/status")).json()
        if status["memory"]["reserved"] > status["memory"]["limit"]:
            found.failures.append(f"reserved beyond the limit: {status['memory']}")
    return found


async def _ready(http: httpx.AsyncClient, server: Child) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise server.failed("it ended")
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.1)
    raise server.failed("it did not come up")


def limit_for(folders: dict[str, Path], holds: int) -> int:
    """Memory that has room for any so many of them, and for no more."""
    launcher = ModelLauncher(Workplace(), Metrics(), idle=1.0, max_queue=1)
    needs = sorted(
        launcher.need(
            ModelSpec(engine=EngineConfig(model=str(f), name=n, kv_memory=KV, cache_memory=CACHE))
        ).smallest
        for n, f in folders.items()
    )
    limit = sum(needs[-holds:])
    if limit >= sum(needs[: holds + 1]):
        print("The smallest of them fit all together; loads may be few.", file=sys.stderr)
    return limit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders, GGUF files or names")
    parser.add_argument("--holds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    folders = {f"m{n}": Path(resolve(model).path) for n, model in enumerate(options.models)}
    options.encoders = {
        name for name, folder in folders.items() if "bert" in read_config(folder)["model_type"]
    }
    limit, port = limit_for(folders, options.holds), free_port()
    command = [sys.executable, "-m", "millrace", "serve", "--only", "--on-demand", *_STATE]
    command += [f"{name}={folder}" for name, folder in folders.items()]
    command += ["--memory", str(limit), "--port", str(port), "--store", "none"]
    with tempfile.TemporaryDirectory(prefix="bench-models-") as logs:
        with child("millrace", command, logs=Path(logs), port=port) as server:
            began = time.monotonic()
            found = asyncio.run(measure(server, list(folders), options))
            seconds = time.monotonic() - began
            log = server.log.read_text()
        sys.exit(_report(found, log, limit, seconds, folders, options))


def _report(
    found: Found,
    log: str,
    limit: int,
    seconds: float,
    folders: dict[str, Path],
    options: argparse.Namespace,
) -> int:
    loads = Counter(re.findall(r"\bloading (m\d+):", log))
    reasons = Counter(re.findall(r"unloading (m\d+ \([^)]*\))", log))
    peak = max(found.memory, default=0)
    out = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "folder", "answers", "loads"):
        table.add_column(column)
    for name, folder in folders.items():
        answers = sum(n for key, n in found.answered.items() if key.split()[0] == name)
        table.add_row(name, folder.name, str(answers), str(loads[name]))
    out.print(table)
    out.print(
        f"{sum(found.answered.values())} of {options.requests} answered in {seconds:.0f} s; "
        f"engines' memory at most {in_words(peak)} of {in_words(limit)} "
        f"({len(found.memory)} samples), the front beside them {in_words(found.front)}"
    )
    for reason, count in sorted(reasons.items()):
        out.print(f"{count} times: unloading {reason}", markup=False)
    for failure in itertools.islice(found.failures, 10):
        out.print(f"[red]failed:[/] {failure}")
    if options.json:
        figures = {"loads": loads, "reasons": reasons, "peak": peak, "limit": limit}
        options.json.write_text(json.dumps(figures | {"failures": found.failures}) + "\n")
    return 1 if found.failures or peak > limit else 0


if __name__ == "__main__":
    main()
