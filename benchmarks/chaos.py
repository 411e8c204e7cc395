"""Endless streams and busy clients while the engine is killed, stopped and poisoned.

    python benchmarks/chaos.py --minutes 10 --kills 100 --stops 20 --poisoned 10

First everything runs undisturbed for a while, then beside the faults. Held to: no healthy stream
fails or changes, every poisoned request ends in an error, and between the faults the streams are
as fast as undisturbed. The model is the tiny one of the tests, whose engine some tokens end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import default_model
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import poisoned
from conftest import Server

STREAM_TOKENS = 1500
CLIENT_TOKENS = 40
SHARE = 0.8
"""Of the undisturbed throughput, between faults."""
SETTLED = 1.0
"""Seconds after an engine is ready again, from which on throughput counts."""


@dataclass
class World:
    server: Server
    http: httpx.AsyncClient
    expected: dict[int, str] = field(default_factory=dict)
    """What the streams and clients say undisturbed, by number."""
    tokens: int = 0
    done: int = 0
    problems: list[str] = field(default_factory=list)
    measured_tokens: int = 0
    measured_seconds: float = 0.0
    quiet_since: float = 0.0
    """Since when no fault has been under way; infinity while one is."""

    async def stream(self, number: int, tokens: int) -> str:
        """One stream's text; what is wrong with it is noted."""
        text = ""
        body = poisoned.healthy(number, tokens) | {"stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.problems.append(f"stream {number}: {event['error']['message']}")
                    return ""
                text += event["choices"][0]["text"]
                self.tokens += 1
        return text

    async def keep_asking(self, number: int, tokens: int) -> None:
        while True:
            text = await self.stream(number, tokens)
            self.done += 1
            if self.expected.setdefault(number, text) != text:
                self.problems.append(f"stream {number} changed")

    async def measure(self) -> None:
        """Count tokens and seconds while no fault is under way."""
        before, last = self.tokens, time.monotonic()
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            if self.quiet_since + SETTLED < last:
                self.measured_tokens += self.tokens - before
                self.measured_seconds += now - last
            before, last = self.tokens, now

    @property
    def rate(self) -> float:
        return self.measured_tokens / max(self.measured_seconds, 1e-9)

    async def status(self) -> dict[str, Any]:
        return dict((await self.http.get("/v1/status")).json()["models"][0])

    async def recovered(self, restarts: int) -> None:
        while True:
            status = await self.status()
            if status["restarts"] > restarts and status["state"] == "ready":
                self.quiet_since = time.monotonic()
                return
            await asyncio.sleep(0.1)


async def _fault(world: World, kind: str, source: random.Random) -> float:
    """Do it, and wait until requests are served again; returns the seconds that took."""
    status = await world.status()
    begin = time.monotonic()
    world.quiet_since = float("inf")
    if kind == "poison":
        body = source.choice((poisoned.in_prompt, poisoned.in_answer))(poisoned.ABORT)
        answer = await world.http.post("/v1/completions", json=body)
        if answer.status_code != 503:
            world.problems.append(f"a poisoned request was answered with {answer.status_code}")
    else:
        os.kill(status["engine_pid"], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    await world.recovered(status["restarts"])
    return time.monotonic() - begin


async def _undisturbed(world: World, options: argparse.Namespace) -> float:
    """Everybody at once, until each has been answered; returns the tokens per second."""
    measuring = asyncio.create_task(world.measure())
    asking = _everybody(world, options)
    await asyncio.sleep(options.warm)
    while len(world.expected) < options.streams + options.clients:
        await asyncio.sleep(0.5)
    rate = world.rate
    for task in (*asking, measuring):
        task.cancel()
    await asyncio.gather(*asking, measuring, return_exceptions=True)
    world.measured_tokens, world.measured_seconds = 0, 0.0
    return rate


def _everybody(world: World, options: argparse.Namespace) -> list[asyncio.Task[None]]:
    sizes = [STREAM_TOKENS] * options.streams + [CLIENT_TOKENS] * options.clients
    return [asyncio.create_task(world.keep_asking(n, size)) for n, size in enumerate(sizes)]


async def _run(server: Server, options: argparse.Namespace) -> bool:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        world = World(server, http)
        alone = await _undisturbed(world, options)
        source = random.Random(options.seed)
        faults = ["kill"] * options.kills + ["stop"] * options.stops
        faults += ["poison"] * options.poisoned
        source.shuffle(faults)
        asking = [asyncio.create_task(world.measure()), *_everybody(world, options)]
        begin, took = time.monotonic(), dict[str, list[float]]()
        done = world.done
        world.quiet_since = begin
        for place, kind in enumerate(faults):
            due = begin + 60 * options.minutes * (place + source.random()) / len(faults)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            took.setdefault(kind, []).append(await _fault(world, kind, source))
        await asyncio.sleep(max(5.0, begin + 60 * options.minutes - time.monotonic()))
        restarts = (await world.status())["restarts"]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return _report(world, alone, took, restarts, world.done - done)


def _report(
    world: World, alone: float, took: dict[str, list[float]], restarts: int, done: int
) -> bool:
    out = Console()
    table = Table("fault", "times", "served again after, mean", "longest")
    for kind, seconds in sorted(took.items()):
        mean = sum(seconds) / len(seconds)
        table.add_row(kind, str(len(seconds)), f"{mean:.1f} s", f"{max(seconds):.1f} s")
    out.print(table)
    share = world.rate / max(alone, 1e-9)
    out.print(
        f"{restarts} restarts; {done} healthy answers, {len(world.problems)} problems; "
        f"{alone:.0f} tokens/s undisturbed, {world.rate:.0f} between faults ({share:.2f}) "
        f"over {world.measured_seconds:.0f} s"
    )
    for problem in world.problems[:20]:
        out.print(f"[red]{problem}[/]")
    return not world.problems and share >= SHARE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--poisoned", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--warm", type=float, default=20.0, help="least seconds undisturbed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = poisoned.make(Path(folder, "model"), default_model())
        server = Server(str(model), "--name", "tiny", "--trust-remote-code").wait_ready()
        try:
            good = asyncio.run(_run(server, options))
        finally:
            server.stop()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
