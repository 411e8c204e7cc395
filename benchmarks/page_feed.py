"""What the status feed costs the server while it answers 16 streams.

    PYTHONPATH=. python benchmarks/page_feed.py [--model FOLDER] [--streams 16] [--listeners 1 8]

Windows without listeners and with each number of them take turns. Told for each: the processor time of all
that the feed does, counted in the server itself (metered_feed.py), as a share of one core; the same per
second; that of the front in all; and the tokens made. The engine is not asked: a snapshot is made from what
the front knows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from common import HERE, Child, child, default_model, free_port, wait_healthy, warn_if_busy
from rich.console import Console
from rich.table import Table

WANTED = 0.01
"""Of one core, at most."""


@dataclass(frozen=True)
class Counted:
    """Since the server began, at one moment."""

    moment: float
    feed: float
    snapshots: int
    front: float
    tokens: int


@dataclass(frozen=True)
class Window:
    feed: float
    """Of one core."""
    front: float
    tokens: float
    """A second."""
    snapshots: float
    """A second."""


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def count(client: httpx.AsyncClient, pid: int) -> Counted:
    meter = (await client.get("/meter")).json()
    status = (await client.get("/v1/status")).json()
    tokens = sum(m["totals"]["generated_tokens"] for m in status["models"])
    return Counted(
        time.monotonic(), meter["seconds"], meter["snapshots"], processor_seconds(pid), tokens
    )


async def answer(client: httpx.AsyncClient, number: int) -> None:
    """One stream after the other, for as long as it is let."""
    while True:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
            "max_tokens": 400, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass


async def listen(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/v1/status/stream") as response:
        response.raise_for_status()
        async for _ in response.aiter_bytes():
            pass


async def window(client: httpx.AsyncClient, pid: int, listeners: int, seconds: float) -> Window:
    listening = [asyncio.create_task(listen(client)) for _ in range(listeners)]
    await asyncio.sleep(1.5)
    before = await count(client, pid)
    await asyncio.sleep(seconds)
    after = await count(client, pid)
    assert not any(task.done() for task in listening), "a listener was turned away"
    await _end(listening)
    took = after.moment - before.moment
    return Window(
        feed=(after.feed - before.feed) / took,
        front=(after.front - before.front) / took,
        tokens=(after.tokens - before.tokens) / took,
        snapshots=(after.snapshots - before.snapshots) / took,
    )


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measure(options: argparse.Namespace, server: Child) -> dict[int, list[Window]]:
    limits, pid = httpx.Limits(max_connections=None), server.process.pid
    found: dict[int, list[Window]] = {n: [] for n in (0, *options.listeners)}
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
        streams = [asyncio.create_task(answer(client, n)) for n in range(options.streams)]
        await asyncio.sleep(3)
        for _ in range(options.rounds):
            for listeners, windows in found.items():
                windows.append(await window(client, pid, listeners, options.seconds))
        assert not any(task.done() for task in streams), "a stream failed"
        await _end(streams)
    return found


@contextmanager
def metered(model: str) -> Iterator[Child]:
    port = free_port()
    command = [sys.executable, str(HERE / "metered_feed.py"), "serve", model, "--port", str(port)]
    command += ["--only", "--cache-disk", "0", "--log-level", "warning"]
    with (
        tempfile.TemporaryDirectory() as folder,
        child("millrace", command, logs=Path(folder), port=port) as server,
    ):
        wait_healthy(server)
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(default_model()))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--listeners", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json")
    options = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    with metered(options.model) as server:
        found = asyncio.run(measure(options, server))
    table = Table(
        title=f"{options.streams} streams; medians of {options.rounds} windows of {options.seconds:g} s"
    )
    for name in (
        "listeners",
        "feed, of a core",
        "feed, ms a second",
        "front, of a core",
        "tokens/s",
    ):
        table.add_column(name, justify="right")
    for listeners, windows in found.items():
        middle = {k: statistics.median(asdict(w)[k] for w in windows) for k in asdict(windows[0])}
        table.add_row(
            str(listeners), f"{middle['feed']:.3%}", f"{middle['feed'] * 1e3:.2f}",
            f"{middle['front']:.1%}", f"{middle['tokens']:.1f}",
        )  # fmt: skip
    console.print(table)
    most = max(w.feed for windows in found.values() for w in windows)
    verdict = "PASS" if most < WANTED else "FAIL"
    console.print(
        f"{verdict}: the feed takes at most {most:.3%} of a core, wanted under {WANTED:.0%}"
    )
    if options.json:
        told = {str(n): [asdict(w) for w in windows] for n, windows in found.items()}
        Path(options.json).write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
