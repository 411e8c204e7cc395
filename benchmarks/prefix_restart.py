"""Time to the first token of a long prompt whose state is nowhere, in memory, or on disk."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from common import Child, child, free_port, prompts, wait_healthy
from timed import Timed, complete, get, kill_engine, wait_written

WISH = {2000: 1860, 4000: 3720}
"""What the workload must be asked for to make so many of the default model's tokens."""
PLACES = ("cold", "in memory", "after SIGTERM", "after kill -9")


@dataclass
class Restart:
    seconds: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PLACES})
    tokens: list[int] = field(default_factory=list)
    run: dict[str, list[int]] = field(default_factory=lambda: {p: [] for p in PLACES})

    def add(self, place: str, timed: Timed) -> None:
        self.seconds[place].append(timed.seconds)
        self.run[place].append(timed.run_tokens or 0)

    def median(self, place: str) -> float:
        return statistics.median(self.seconds[place])

    def ratio(self, place: str) -> float:
        return self.median(place) / self.median("cold")


def millrace(model: Path, disk: Path, *more: str) -> tuple[list[str], int]:
    """The command of a server, and its port."""
    port = free_port()
    command = [sys.executable, "-m", "millrace", "serve", str(model), "--port", str(port)]
    return [*command, "--name", "default_model", "--cache-dir", str(disk), *more], port


def restart(model: Path, logs: Path, rounds: int, seed: int) -> Restart:
    found = Restart()
    items = prompts(rounds, WISH[2000], 1, seed, "restart")
    texts = [item.prompt for item in items]
    command, port = millrace(model, logs / "disk")
    with child("before", command, logs=logs, port=port) as server:
        wait_healthy(server)
        _wake(server)
        for text in texts:
            cold = complete(server, text)
            found.tokens.append(cold.prompt_tokens)
            found.add("cold", cold)
            found.add("in memory", complete(server, text))
    with child("after", command, logs=logs, port=port) as server:
        wait_healthy(server)
        _wake(server)
        for text in texts:
            found.add("after SIGTERM", complete(server, text))
        wait_written(server)
        kill_engine(server)
        _wake(server)
        for text in texts:
            found.add("after kill -9", complete(server, text))
    return found


def _wake(server: Child) -> None:
    """The first run of anything costs more than the rest."""
    complete(server, f"Good morning, it is {time.time()}.", 4)


@dataclass
class Drop:
    tokens: int
    at: int
    """Tokens that were run when the client left."""
    again: int
    """Tokens that were run for the second request."""


def drop(model: Path, logs: Path, seed: int) -> Drop:
    """A client that leaves in the middle of a long prefill, and asks again."""
    text = prompts(1, WISH[4000], 1, seed, "drop")[0].prompt
    command, port = millrace(model, logs / "dropped", "--cache-disk", "0")
    with child("drop", command, logs=logs, port=port) as server:
        wait_healthy(server)
        _wake(server)
        seen = [0, 0]
        leaving = threading.Thread(target=_leave_at_half, args=(server, text, seen))
        leaving.start()
        leaving.join()
        again = complete(server, text)
    return Drop(again.prompt_tokens, seen[0], again.run_tokens or 0)


def _leave_at_half(server: Child, text: str, seen: list[int]) -> None:
    body = {"prompt": text, "max_tokens": 1, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300):
        while True:
            requests = get(server, "/v1/status")["models"][0]["requests"]
            for request in requests:
                seen[:] = request["prefilled_tokens"], request["prompt_tokens"]
            if seen[0] >= seen[1] / 2 > 0 or not requests:
                return
            time.sleep(0.02)
