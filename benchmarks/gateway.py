"""Two workers behind PyPI's SMG gateway: what its routing finds in caches, and what a death costs.

    python benchmarks/gateway.py --smg .venv-gateway/bin/smg
    python benchmarks/gateway.py --only overhead

Routing: 16 clients lead conversations as agents do, with long instructions that several of them share;
the part of all prompts that was found in a cache, with cache-aware routing and in turn. Deaths: the same
load while one worker is killed with -9, its engine at first, the whole server then, and started again;
requests that failed. Overhead: tokens per second of eight streams over gRPC and over HTTP, without a
gateway, and over HTTP through one. `--demo` tells of one death as it happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from smg_gateway.processes import Gateway, WorkerServer

out = Console(highlight=False)
CLIENTS = 16
GROUPS = 4
"""Instructions, each of which a fourth of the clients share."""
TURNS = 5
ANSWER = 12
STREAMS = 8
STREAM_TOKENS = 100
ROUNDS = 7
NAME = "worker"
ASKED = [{"role": "user", "content": "Count up from one."}]
Way = Callable[[httpx.AsyncClient], Awaitable[int]]
"""One stream; returns how many tokens it had."""


@dataclass
class Tally:
    prompt: int = 0
    cached: int = 0
    done: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    def count(self, usage: dict[str, Any]) -> None:
        self.done += 1
        self.prompt += usage["prompt_tokens"]
        self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def worker(address: str = "") -> WorkerServer:
    return WorkerServer("--name", NAME, "--max-running", "16", worker=address)


def instructions(group: int) -> str:
    rules = (
        f"Rule {n} of handbook {group}: step {n} comes before step {n + 1}." for n in range(24)
    )
    return " ".join(rules)


async def converse(http: httpx.AsyncClient, number: int, turns: int, tally: Tally) -> None:
    """One client's conversation; odd ones are streamed."""
    messages = [{"role": "system", "content": instructions(number % GROUPS)}]
    for turn in range(turns):
        question = f"Client {number} asks: what comes after step {turn}?"
        messages.append({"role": "user", "content": question})
        body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": ANSWER}
        try:
            text = await (_streamed if number % 2 else _whole)(http, body, tally)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            tally.failed[f"{'stream' if number % 2 else 'whole'}: {_brief(error)}"] += 1
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _brief(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:80]


async def _whole(http: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> str:
    response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise ValueError(f"{response.status_code} {response.text[:60]}")
    answer = response.json()
    tally.count(answer["usage"])
    return str(answer["choices"][0]["message"]["content"])


async def _streamed(http: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> str:
    text, usage, ended = "", None, False
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {(await response.aread())[:60]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"])[:60])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    ended |= bool(choice.get("finish_reason"))
    if not ended or usage is None:
        raise ValueError("the stream ended without an end")
    tally.count(usage)
    return text


async def load(url: str, turns: int, tally: Tally) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await asyncio.gather(*(converse(http, n, turns, tally) for n in range(CLIENTS)))


@asynccontextmanager
async def fleet(smg: Path, *args: str) -> AsyncIterator[tuple[list[WorkerServer], Gateway]]:
    """Two fresh workers and a gateway; the list is the caller's to replace one in."""
    workers = [worker(), worker()]
    gateway = None
    try:
        for each in workers:
            await asyncio.to_thread(each.wait_ready)
        gateway = Gateway(workers, *args, smg=smg)
        await asyncio.to_thread(gateway.wait_ready)
        yield workers, gateway
    finally:
        if gateway is not None:
            gateway.stop()
        for each in workers:
            each.stop()


async def routing(smg: Path, turns: int) -> None:
    table = Table("policy", "requests", "failed", "prompt tokens", "found", "hit rate")
    for policy in ("cache_aware", "round_robin"):
        async with fleet(smg, "--policy", policy) as (_, gateway):
            tally = Tally()
            await load(gateway.url, turns, tally)
        failed = sum(tally.failed.values())
        numbers = (tally.done, failed, tally.prompt, tally.cached, f"{tally.rate:.1%}")
        table.add_row(policy, *map(str, numbers))
    out.print(table)


async def deaths(smg: Path, turns: int, *, tell: bool = False) -> None:
    table = Table("killed with -9", "requests", "failed")
    for victim in ("server",) if tell else ("engine", "server"):
        async with fleet(smg, "--policy", "cache_aware") as (workers, gateway):
            tally = Tally()
            running = asyncio.create_task(load(gateway.url, turns, tally))
            while tally.done < CLIENTS and not running.done():
                await asyncio.sleep(0.05)
            if tell:
                out.print(f"{tally.done} requests are done; worker {workers[0].worker} is killed")
            if victim == "engine":
                workers[0].kill_engine()
            else:
                await _replace(workers, tell)
            await running
            if tell:
                out.print(f"workers now: {_health(gateway)}")
        table.add_row(victim, str(tally.done), str(sum(tally.failed.values())))
        for reason, count in tally.failed.items():
            out.print(f"  {count} × {reason}", markup=False)
    out.print(table)


async def _replace(workers: list[WorkerServer], tell: bool) -> None:
    """Kill a server and start another at its address."""
    old = workers[0]
    os.kill(old.process.pid, signal.SIGKILL)
    old.process.wait()
    await asyncio.sleep(1.0)
    workers[0] = worker(old.worker)
    await asyncio.to_thread(workers[0].wait_ready)
    if tell:
        out.print(f"another worker is up at {old.worker}")


def _health(gateway: Gateway) -> str:
    found = gateway.http.get("/workers").json()["workers"]
    return ", ".join(f"{w['url']} {'healthy' if w['is_healthy'] else 'not healthy'}" for w in found)


async def overhead(smg: Path | None) -> None:
    """The same streams over gRPC, over HTTP and through a gateway, turn and turn about."""
    import grpc
    from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

    messages: Any = vllm_engine_pb2
    server, gateway = worker(), None
    limits = httpx.Limits(max_connections=None)
    try:
        await asyncio.to_thread(server.wait_ready)
        ways = {"http": _over_http(server.url)}
        if smg is not None:
            gateway = Gateway([server], smg=smg)
            await asyncio.to_thread(gateway.wait_ready)
            ways["gateway"] = _over_http(gateway.url)
        prompt = server.post("/tokenize", {"messages": ASKED}).json()["tokens"]
        params = {"temperature": 0.0, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        async with grpc.aio.insecure_channel(server.worker) as channel:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)  # type: ignore[no-untyped-call]

            async def over_grpc(_: httpx.AsyncClient) -> int:
                wire = messages.GenerateRequest(
                    tokenized={"input_ids": prompt}, sampling_params=params, stream=True
                )
                return sum([len(m.chunk.token_ids) async for m in stub.Generate(wire)])

            ways["grpc"] = over_grpc
            async with httpx.AsyncClient(timeout=120, limits=limits) as http:
                await _compared(server, http, ways)
    finally:
        if gateway is not None:
            gateway.stop()
        server.stop()


def _over_http(url: str) -> Way:
    async def stream(http: httpx.AsyncClient) -> int:
        body = {
            "model": NAME, "messages": ASKED, "temperature": 0, "max_tokens": STREAM_TOKENS,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        count = 0
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                    count = usage["completion_tokens"]
        return count

    return stream


async def _compared(server: WorkerServer, http: httpx.AsyncClient, ways: dict[str, Way]) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        await asyncio.gather(*(way(http) for _ in range(STREAMS)))
    for number in range(ROUNDS):
        # Whoever goes first does so every other time: a machine's load drifts.
        for name in sorted(ways, reverse=number % 2 > 0):
            began, busy = time.monotonic(), _busy(server)
            tokens = sum(await asyncio.gather(*(ways[name](http) for _ in range(STREAMS))))
            rates[name].append(tokens / (time.monotonic() - began))
            spent[name].append(1e6 * (_busy(server) - busy) / tokens)
    table = Table("tokens/s of eight streams", *(f"{n + 1}" for n in range(ROUNDS)), "median")
    for name, found in rates.items():
        table.add_row(name, *(f"{r:.0f}" for r in found), f"{statistics.median(found):.1f}")
    for name, found in spent.items():
        label = f"front's µs per token, {name}"
        table.add_row(label, *(f"{r:.0f}" for r in found), f"{statistics.median(found):.1f}")
    out.print(table)
    for name in rates.keys() - {"http"}:
        ratios = [a / b for a, b in zip(rates[name], rates["http"], strict=True)]
        out.print(f"{name} over http, the median of the rounds: {statistics.median(ratios):.3f}")
    out.print("0.95 is wanted of gRPC")


def _busy(server: WorkerServer) -> float:
    """Seconds of processor time that the server's front has used; 0 where that is not told."""
    try:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smg", type=Path, default=Path(".venv-gateway/bin/smg"))
    parser.add_argument("--only", choices=("routing", "deaths", "overhead"))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--demo", action="store_true", help="one death, told as it happens")
    chosen = parser.parse_args(arguments)
    if chosen.demo:
        asyncio.run(deaths(chosen.smg, 2 * chosen.turns, tell=True))
        return
    if chosen.only in (None, "routing"):
        asyncio.run(routing(chosen.smg, chosen.turns))
    if chosen.only in (None, "deaths"):
        asyncio.run(deaths(chosen.smg, 2 * chosen.turns))
    if chosen.only in (None, "overhead"):
        asyncio.run(overhead(chosen.smg if chosen.smg.exists() else None))


if __name__ == "__main__":
    main()
