"""Servers under a closed loop of clients: each asks again as soon as it was answered.

Lengths are log-normal, about 400 tokens in and 160 out. Several servers take turns, round by round, with
the same requests, so that what the machine does meanwhile falls on all of them; each round draws new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from common import warn_if_busy
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from millrace.bench.load import Wire, body, make_client
from millrace.bench.sse import DONE, Events, read_chunk
from millrace.bench.stats import percentile
from millrace.bench.workload import Item, Sizing, compose

IN, OUT = (5.6, 0.9, 16, 3000), (4.9, 0.7, 16, 400)
"""Mean and spread of the logarithm, least and most: 400 and 160 tokens on average."""
SIZING = Sizing(tokens_per_word=1.5, overhead=14)


@dataclass
class Seen:
    """What clients have received, while it counted."""

    opens: float
    closes: float
    texts: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    events: int = 0
    """Of answers that ended, whenever they did; so are `tokens`, which may come several in an event."""
    tokens: int = 0

    def note(self, sent: float, texts: list[float]) -> None:
        counted = [self.opens <= at <= self.closes for at in texts]
        self.texts += sum(counted)
        if texts and counted[0]:
            self.first.append(texts[0] - sent)
        pairs = zip(pairwise(texts), counted[1:], strict=True)
        self.gaps += [b - a for (a, b), counts in pairs if counts]


@dataclass(frozen=True)
class Figures:
    tokens_per_s: float
    first_p50: float
    first_p90: float
    gap_p50: float
    gap_p99: float

    @classmethod
    def of(cls, seen: Seen) -> Figures:
        each = seen.tokens / seen.events if seen.events else 1.0
        first, gaps = sorted(seen.first) or [float("nan")], sorted(seen.gaps) or [float("nan")]
        return cls(
            seen.texts * each / (seen.closes - seen.opens),
            percentile(first, 0.5),
            percentile(first, 0.9),
            percentile(gaps, 0.5),
            percentile(gaps, 0.99),
        )


def requests(seed: str) -> Iterator[Item]:
    """Prompts that share nothing, without end."""
    draws, number = random.Random(seed), 0
    while True:
        number += 1
        tokens, answer = (
            round(min(most, max(least, draws.lognormvariate(mean, spread))))
            for mean, spread, least, most in (IN, OUT)
        )
        text = compose(f"{seed}/{number}", SIZING.words(tokens), chat=False)
        yield Item(prompt=text, max_tokens=answer)


async def load(
    url: str, model: str, clients: int, seed: str, settle: float, seconds: float
) -> Seen:
    """Keep this many clients at a server; what they saw after `settle` seconds, for `seconds`."""
    items, begun = requests(seed), time.perf_counter()
    seen = Seen(begun + settle, begun + settle + seconds)
    async with make_client() as http:

        async def client() -> None:
            while time.perf_counter() < seen.closes:
                try:
                    await ask(http, url, model, next(items), seen)
                except httpx.HTTPError as error:
                    seen.failures.append(str(error) or type(error).__name__)
                    await asyncio.sleep(0.5)

        running = [asyncio.create_task(client()) for _ in range(clients)]
        await asyncio.sleep(settle + seconds)
        for task in running:
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return seen


async def ask(http: httpx.AsyncClient, url: str, model: str, item: Item, seen: Seen) -> None:
    payload = body(item, model, Wire(endpoint="completions", temperature=0.7, ignore_eos=True))
    more = {"content-type": "application/json"}
    sent, texts, ended = time.perf_counter(), list[float](), False
    try:
        async with http.stream("POST", f"{url}/completions", content=payload, headers=more) as got:
            if got.status_code != 200:
                await got.aread()
            got.raise_for_status()
            events = Events()
            async for received in got.aiter_bytes():
                now = time.perf_counter()
                for data in events.feed(received):
                    if data == DONE:
                        ended = True
                        continue
                    chunk = read_chunk(data)
                    if chunk.error is not None:
                        raise httpx.RemoteProtocolError(chunk.error)
                    if chunk.text:
                        texts.append(now)
                    if chunk.usage is not None:
                        seen.tokens += chunk.usage.completion_tokens or 0
                        seen.prompts.append(chunk.usage.prompt_tokens or 0)
                        seen.events += len(texts)
            if not ended:
                raise httpx.RemoteProtocolError("the stream ended early")
    finally:
        seen.note(sent, texts)


async def measure(options: argparse.Namespace, console: Console) -> dict[int, list[list[Figures]]]:
    """By the number of clients, each server's figures in each round."""
    urls = [url.rstrip("/").removesuffix("/v1") + "/v1" for url in options.url]
    async with make_client() as http:
        models = [(await http.get(f"{url}/models")).json()["data"][0]["id"] for url in urls]
    found: dict[int, list[list[Figures]]] = {}
    for clients in options.clients:
        found[clients] = [[] for _ in urls]
        for number in range(options.rounds):
            order = list(range(len(urls)))
            for place in order if number % 2 == 0 else order[::-1]:
                seed = f"{options.seed}/{clients}/{number}"
                seen = await load(
                    urls[place], models[place], clients, seed, options.settle, options.seconds
                )
                figures = Figures.of(seen)
                found[clients][place].append(figures)
                prompt = statistics.mean(seen.prompts) if seen.prompts else 0
                console.print(
                    f"{clients} clients, round {number + 1}, {options.url[place]}: "
                    f"{figures.tokens_per_s:.1f} tokens/s, {len(seen.first)} answers begun, "
                    f"{prompt:.0f} tokens in a prompt, {len(seen.failures)} failures",
                    highlight=False,
                )
                for failure in sorted(set(seen.failures)):
                    console.print(f"  [red]{failure}[/]", highlight=False)
    return found


def median(figures: list[Figures]) -> Figures:
    columns = zip(*(asdict(one).values() for one in figures), strict=True)
    return Figures(*map(statistics.median, columns))


def table(options: argparse.Namespace, found: dict[int, list[list[Figures]]]) -> Table:
    shown = Table(box=SIMPLE, title="medians of the rounds; × is beside the first server")
    names = ("tokens/s", "first p50", "first p90", "gap p50", "gap p99")
    for column in ("clients", "server", *names):
        shown.add_column(column, justify="left" if column == "server" else "right")
    for clients, servers in found.items():
        first = asdict(median(servers[0]))
        for url, rounds in zip(options.url, servers, strict=True):
            cells = [str(clients), url]
            for name, value in asdict(median(rounds)).items():
                cells.append(f"{value:.3g}{'' if name == 'tokens_per_s' else ' s'}")
            shown.add_row(*cells)
            if rounds is not servers[0]:
                own = asdict(median(rounds))
                shown.add_row("", "", *(f"× {own[name] / first[name]:.2f}" for name in own))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", action="append", required=True, help="a server; may be repeated")
    parser.add_argument("--clients", default="1,4,16", help="how many at once, one after the other")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a round is measured for")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before that")
    parser.add_argument("--rounds", type=int, default=3, help="of each server")
    parser.add_argument("--seed", default=None, help="of an earlier run; drawn anew without one")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    options.clients = [int(count) for count in options.clients.split(",")]
    options.seed = options.seed or secrets.token_hex(4)
    console = Console()
    warn_if_busy(console)
    console.print(f"seed {options.seed}", highlight=False)
    found = asyncio.run(measure(options, console))
    console.print(table(options, found))
    if options.json:
        rounds = {
            clients: dict(
                zip(options.url, [[asdict(one) for one in each] for each in servers], strict=True)
            )
            for clients, servers in found.items()
        }
        options.json.write_text(json.dumps({"seed": options.seed, "clients": rounds}, indent=1))


if __name__ == "__main__":
    main()
