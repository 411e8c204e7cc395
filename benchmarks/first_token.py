"""Time to the first token: of one long prompt alone, and of agents that share a long prefix.

Agents send a prefix that all of them have, each its own task, and ask again behind what was said before;
the first turn of the first agent fills the prefix cache, and later turns are measured.
`python benchmarks/first_token.py --url URL` (`--lengths`, `--agents`, `--prefix`, `--turns`, `--rounds`)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import time
from pathlib import Path

import httpx

from millrace.bench.load import Wire, body, make_client
from millrace.bench.sse import DONE, Events
from millrace.bench.stats import percentile
from millrace.bench.workload import Item, Sizing, compose

SIZING = Sizing(tokens_per_word=1.5, overhead=14)
ANSWER, TASK = 64, 150
"""Tokens of an agent's answer, and about how many it sends more in each turn."""


class Client:
    def __init__(self, http: httpx.AsyncClient, url: str, model: str) -> None:
        self.http, self.url, self.model = http, url, model

    async def ask(self, prompt: str, tokens: int) -> tuple[float, str, int, int]:
        """Seconds to the first text, the text, and how many tokens the prompt had and the cache knew."""
        payload = body(
            Item(prompt=prompt, max_tokens=tokens),
            self.model,
            Wire(endpoint="completions", temperature=0.7, ignore_eos=True),
        )
        sent, first, text, prompt_tokens, cached = time.perf_counter(), 0.0, "", 0, 0
        headers = {"content-type": "application/json"}
        async with self.http.stream(
            "POST", f"{self.url}/completions", content=payload, headers=headers
        ) as got:
            if got.status_code != 200:
                await got.aread()
            got.raise_for_status()
            events = Events()
            async for received in got.aiter_bytes():
                for data in events.feed(received):
                    if data == DONE:
                        continue
                    chunk = json.loads(data)
                    if new := "".join(choice["text"] for choice in chunk["choices"]):
                        first = first or time.perf_counter() - sent
                        text += new
                    if usage := chunk.get("usage"):
                        prompt_tokens = usage["prompt_tokens"]
                        details = usage.get("prompt_tokens_details") or {}
                        cached = details.get("cached_tokens", 0)
        return first, text, prompt_tokens, cached


async def alone(client: Client, length: int, rounds: int) -> dict[str, float]:
    """Prompts drawn anew, one after the other."""
    found, tokens = [], 0
    for _ in range(rounds):
        prompt = compose(secrets.token_hex(4), SIZING.words(length), chat=False)
        first, _, tokens, _ = await client.ask(prompt, 4)
        found.append(first)
    return {"prompt_tokens": tokens, "first_token": statistics.median(found), "worst": max(found)}


async def agents(client: Client, count: int, prefix: int, turns: int) -> dict[str, float]:
    seed = secrets.token_hex(4)
    shared = compose(seed, SIZING.words(prefix), chat=False)
    await client.ask(shared + "\n", 1)
    found: list[float] = []
    lacking: list[int] = []

    async def agent(number: int) -> None:
        text = shared
        for turn in range(turns):
            text += "\n" + compose(f"{seed}/{number}/{turn}", SIZING.words(TASK), chat=False)
            first, answer, tokens, cached = await client.ask(text, ANSWER)
            text += answer
            if turn:
                found.append(first)
                lacking.append(tokens - cached)

    await asyncio.gather(*(agent(number) for number in range(count)))
    return {
        "first_token": statistics.median(found),
        "p90": percentile(sorted(found), 0.9),
        "not_cached": statistics.median(lacking),
    }


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    url = options.url.rstrip("/").removesuffix("/v1") + "/v1"
    result: dict[str, dict[str, float]] = {}
    async with make_client() as http:
        model = (await http.get(f"{url}/models")).json()["data"][0]["id"]
        client = Client(http, url, model)
        for length in options.lengths:
            found = result[str(length)] = await alone(client, length, options.rounds)
            print(
                f"a prompt of {found['prompt_tokens']} tokens alone: first token after "
                f"{found['first_token']:.2f} s (median of {options.rounds}, at most {found['worst']:.2f})",
                flush=True,
            )
        if options.agents:
            shown = f"{options.agents} agents on a prefix of about {options.prefix} tokens"
            found = result["agents"] = await agents(
                client, options.agents, options.prefix, options.turns
            )
            print(
                f"{shown}: first token of later turns p50 {found['first_token']:.2f} s, p90 "
                f"{found['p90']:.2f} s; {found['not_cached']:.0f} tokens of a prompt were not cached",
                flush=True,
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--lengths", default="8000,30000", help="of prompts that are alone")
    parser.add_argument("--rounds", type=int, default=3, help="of each length")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=6000, help="tokens that all agents share")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    options.lengths = [int(one) for one in options.lengths.split(",") if one]
    result = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
