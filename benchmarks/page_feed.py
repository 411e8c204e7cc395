"""What listening to the server's status costs it while it answers 16 streams.

    PYTHONPATH=. python benchmarks/page_feed.py [MODEL] [--streams 16] [--listeners 1] [--seconds 8]

Windows with and without listeners take turns; the processor time of the front and the tokens made are
told for each, and what one snapshot takes in all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx

PORT = 8797
URL = f"http://127.0.0.1:{PORT}"


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def answer(client: httpx.AsyncClient, number: int) -> None:
    """One stream after the other, for as long as it is let."""
    while True:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
            "max_tokens": 400, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with client.stream("POST", f"{URL}/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                pass


async def listen(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", f"{URL}/v1/status/stream") as response:
        async for _ in response.aiter_bytes():
            pass


async def made(client: httpx.AsyncClient) -> int:
    status = (await client.get(f"{URL}/v1/status")).json()
    return sum(m["totals"]["generated_tokens"] for m in status["models"])


async def window(
    client: httpx.AsyncClient, pid: int, listeners: int, seconds: float
) -> tuple[float, float]:
    """Processor seconds of the front per second, and tokens per second."""
    listening = [asyncio.create_task(listen(client)) for _ in range(listeners)]
    await asyncio.sleep(1)
    began, cpu, tokens = time.monotonic(), processor_seconds(pid), await made(client)
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    found = (processor_seconds(pid) - cpu) / took, (await made(client) - tokens) / took
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    return found


async def run(options: argparse.Namespace, pid: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        while True:
            try:
                if (await client.get(f"{URL}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        streams = [asyncio.create_task(answer(client, n)) for n in range(options.streams)]
        await asyncio.sleep(3)
        cpu: dict[int, list[float]] = {0: [], options.listeners: []}
        rate: dict[int, list[float]] = {0: [], options.listeners: []}
        for _ in range(options.rounds):
            for listeners in cpu:
                used, tokens = await window(client, pid, listeners, options.seconds)
                cpu[listeners].append(used)
                rate[listeners].append(tokens)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    print(f"{options.streams} streams; medians of {options.rounds} windows of {options.seconds} s")
    print("listeners   front's processor   tokens/s")
    for listeners in cpu:
        used, tokens = (statistics.median(x[listeners]) for x in (cpu, rate))
        print(f"{listeners:9}   {used:16.1%}   {tokens:8.1f}")
    more = statistics.median(cpu[options.listeners]) - statistics.median(cpu[0])
    print(f"listening takes {more:.2%} of one core more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--listeners", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "millrace",
        "serve",
        *([options.model] if options.model else []),
    ]
    command += ["--port", str(PORT), "--only", "--cache-disk", "0", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        asyncio.run(run(options, server.pid))
    finally:
        server.terminate()
        server.wait(40)


if __name__ == "__main__":
    main()
