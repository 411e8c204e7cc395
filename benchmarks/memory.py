"""The engine's resident memory under requests of all lengths, against what it was given.

Random prompts of 10 to 6,000 tokens, some with several choices, some dropped in the middle, on a server
with a small key-value budget. The bound is what the engine held when it was ready (its weights and code),
the key-value budget, the cache's budget and 15 % of all that.
`python benchmarks/memory.py --model FOLDER [--requests 500] [--kv-memory 64M] [--cache-memory 64M]`
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

CLIENTS = 12
LONGEST = 6000
SLACK = 1.15


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]?)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) << 10  # type: ignore[union-attr]


async def _client(
    http: httpx.AsyncClient, dice: random.Random, todo: list[int], most_tokens: int
) -> int:
    done = 0
    while todo:
        todo.pop()
        length = int(10 * (LONGEST / 10) ** dice.random())
        body = {
            "prompt": [dice.randrange(3, 40_000) for _ in range(length)],
            "max_tokens": dice.randint(1, most_tokens),
            "n": dice.choice([1, 1, 1, 2, 4]),
            "temperature": 0,
            "ignore_eos": True,
        }
        patience = dice.uniform(0.05, 1.0) if dice.random() < 0.1 else 600.0
        try:
            answer = await http.post("/v1/completions", json=body, timeout=patience)
            assert answer.status_code in (200, 400, 429), answer.text
            done += answer.status_code == 200
        except httpx.TimeoutException:
            pass
    return done


async def _load(
    url: str, pid: int, requests: int, seed: int, most_tokens: int
) -> tuple[int, int, int]:
    todo = list(range(requests))
    most = held = told = 0
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        clients = [
            asyncio.create_task(_client(http, random.Random(seed + k), todo, most_tokens))
            for k in range(CLIENTS)
        ]
        while not all(c.done() for c in clients):
            most = max(most, resident(pid))
            metrics = (await http.get("/metrics")).text
            found = re.search(r"^millrace_kv_bytes\{[^}]*\} (\S+)", metrics, re.M)
            held = max(held, int(float(found.group(1)))) if found else held
            if (left := len(todo)) // 50 != told:
                told = left // 50
                print(f"{left} requests to come; most so far {most >> 20} MiB", flush=True)
            await asyncio.sleep(0.1)
        return most, held, sum(c.result() for c in clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a model folder; small ones are quick")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kv-memory", default="64M")
    parser.add_argument("--cache-memory", default="64M")
    parser.add_argument("--max-tokens", type=int, default=120, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "millrace", "serve", options.model, "--port", str(port)]
    command += ["--kv-memory", options.kv_memory, "--cache-memory", options.cache_memory]
    server = subprocess.Popen([*command, "--cache-disk", "0"], stderr=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                sys.exit(f"The server ended with {server.returncode}.")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        # A grammar's vocabulary is loaded on a thread when the engine starts: it is part of the base.
        time.sleep(3)
        pid = httpx.get(f"{url}/v1/status").json()["models"][0]["engine_pid"]
        base = resident(pid)
        begin = time.monotonic()
        most, held, done = asyncio.run(
            _load(url, pid, options.requests, options.seed, options.max_tokens)
        )
    finally:
        server.terminate()
        server.wait()
    kv, cache = _bytes(options.kv_memory), _bytes(options.cache_memory)
    bound = SLACK * (base + kv + cache)
    print(
        f"{options.requests} requests, {done} answered in {time.monotonic() - begin:.0f} s: "
        f"ready {base >> 20} MiB, most {most >> 20}, allowed {int(bound) >> 20}; key-values at most "
        f"{held >> 20} of {kv >> 20} MiB: {'PASS' if most <= bound and held <= kv else 'FAIL'}"
    )


if __name__ == "__main__":
    main()
