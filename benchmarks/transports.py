"""Tokens per second of the same streams over HTTP and over LocalAI's gRPC, in turns; and how long
Health takes to answer meanwhile.

    PYTHONPATH=. python benchmarks/transports.py

Both servers run beside each other and one works at a time; the streams of a round begin together, and
the round ends with the last of them. The ratio is gRPC's tokens per second over HTTP's. Health is asked
every 10 ms while the model loads, and while it makes as many answers that are not streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
from common import child, default_model, free_port, wait_healthy, warn_if_busy
from rich.console import Console

from millrace.rpc.localai import wire

WANTED = 0.95
WANTED_HEALTH = 100.0
"""Milliseconds."""
Stream = Callable[[str, int], Awaitable[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(default_model()))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs, port, address = Path(folder), free_port(), f"127.0.0.1:{free_port()}"
        python = [sys.executable, "-m", "millrace"]
        command = [*python, "serve", options.model, "--only", "--cache-disk", "0"]
        server = stack.enter_context(
            child("http", [*command, "--port", str(port)], logs=logs, port=port)
        )
        stack.enter_context(child("grpc", [*python, "backend", "--addr", address], logs=logs))
        wait_healthy(server)
        waits: dict[str, list[float]] = {}
        found = asyncio.run(_measure(server.url, address, options, waits))
    ratios = [g / h for h, g in zip(found["http"], found["grpc"], strict=True)]
    for name, rates in found.items():
        told = ", ".join(f"{rate:.1f}" for rate in rates)
        console.print(f"{name}: median {statistics.median(rates):.1f} tokens/s ({told})")
    ratio = statistics.median(ratios)
    verdict = "PASS" if ratio >= WANTED else "FAIL"
    console.print(f"gRPC over HTTP: {ratio:.3f}, wanted {WANTED} {verdict}")
    for name, times in waits.items():
        slowest = max(times)
        verdict = "PASS" if slowest <= WANTED_HEALTH else "FAIL"
        console.print(
            f"Health beside {name}: asked {len(times)} times, median {statistics.median(times):.1f} "
            f"ms, slowest {slowest:.1f} ms, wanted {WANTED_HEALTH:.0f} {verdict}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(found | {"ratio": ratio, "health": waits}))


async def _beside(call: dict[str, Any], work: Awaitable[Any]) -> tuple[Any, list[float]]:
    """What the work gives, and how many milliseconds Health took while it went on."""
    task, waits = asyncio.ensure_future(work), []
    while not task.done():
        began = time.perf_counter()
        await call["Health"](wire.HealthMessage())
        waits.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(0.01)
    return await task, waits


async def _measure(
    url: str, address: str, options: argparse.Namespace, waits: dict[str, list[float]]
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"http": [], "grpc": []}
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as http,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = _methods(channel)
        await call["Health"](wire.HealthMessage(), wait_for_ready=True)
        message = wire.ModelOptions(Model=options.model, EngineArgs='{"cache_disk": 0}')
        result, waits["LoadModel"] = await _beside(call, call["LoadModel"](message))
        if not result.success:
            raise SystemExit(result.message)
        asked = wire.PredictOptions(Prompt="1, 2, 3,", Tokens=options.tokens, IgnoreEOS=True)
        answers = asyncio.gather(*(call["Predict"](asked) for _ in range(options.streams)))
        _, waits["Predict"] = await _beside(call, answers)
        ways: dict[str, Stream] = {"http": _over_http(http), "grpc": _over_grpc(call)}
        for number in range(options.rounds + 1):
            # Who goes first changes, and the first round warms both up.
            for name in sorted(ways, reverse=bool(number % 2)):
                rate = await _round(ways[name], f"{number}", options)
                if number:
                    rates[name].append(rate)
    return rates


async def _round(stream: Stream, mark: str, options: argparse.Namespace) -> float:
    begin = time.perf_counter()
    made = await asyncio.gather(
        *(
            stream(f"Story {mark}.{n}: once upon a time", options.tokens)
            for n in range(options.streams)
        )
    )
    return sum(made) / (time.perf_counter() - begin)


def _over_http(http: httpx.AsyncClient) -> Stream:
    async def stream(prompt: str, tokens: int) -> int:
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        made = 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage")
                    made = usage["completion_tokens"] if usage else made
        return made

    return stream


def _over_grpc(call: dict[str, Any]) -> Stream:
    async def stream(prompt: str, tokens: int) -> int:
        message = wire.PredictOptions(Prompt=prompt, Tokens=tokens, IgnoreEOS=True)
        made = 0
        async for reply in call["PredictStream"](message):
            made = reply.tokens or made
        return made

    return stream


def _methods(channel: grpc.aio.Channel) -> dict[str, Any]:
    found = {}
    for method in wire.METHODS:
        kind = channel.unary_stream if method.streams else channel.unary_unary
        found[method.name] = kind(
            f"/{wire.SERVICE}/{method.name}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )
    return found


if __name__ == "__main__":
    main()
