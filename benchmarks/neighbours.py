"""Gaps between tokens of four streams while others send what is large, or do not read.

Four streams decode. They are measured alone, and then beside each of: a prompt of ten megabytes, one
that is just short enough to be tokenised, a grammar of 30,000 alternatives, a list of 20,000 choices,
and 200 clients that ask for streams and read nothing. Each comes again and again while its time
lasts. The 99th percentile of the streams' gaps is held against the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from common import Child, child, default_model, free_port, prompts, wait_healthy, warn_if_busy
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from millrace.bench.load import Wire, body, make_client
from millrace.bench.sse import DONE, Events, read_chunk
from millrace.bench.stats import percentile
from millrace.bench.workload import Item
from millrace.errors import MillraceError

STREAMS, STREAM_TOKENS = 4, 8000
READERS, READER_TOKENS = 200, 1000
SETTLE = 2.0
AT_MOST = 3.0
_SENTENCE = "Some words of a book that is far too long to be read in one go. "
_HEADERS = {"content-type": "application/json"}


@dataclass
class Gaps:
    """The streams' gaps during one disturbance."""

    seconds: list[float] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)
    """How the disturbing requests were answered, by status."""

    @property
    def p99(self) -> float:
        return percentile(sorted(self.seconds), 0.99)

    @property
    def longest(self) -> float:
        return max(self.seconds)


Disturbance = Callable[[httpx.AsyncClient, str, Gaps], Awaitable[None]]


def main() -> None:
    options = _options()
    console = Console()
    try:
        measured = _run(options, console)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, measured)
    if options.json:
        options.json.write_text(json.dumps({n: asdict(g) for n, g in measured.items()}) + "\n")
        console.print(f"Figures: {options.json}", highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all gaps to this file")
    return parser.parse_args()


def _run(options: argparse.Namespace, console: Console) -> dict[str, Gaps]:
    warn_if_busy(console)
    model = options.model or default_model()
    command = [sys.executable, "-m", "millrace", "serve", str(model), "--name", "default_model"]
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="bench-neighbours-") as logs,
        child(
            "millrace",
            [*command, "--cache-disk", "0", "--port", str(port)],
            logs=Path(logs),
            env={},
            port=port,
        ) as server,
    ):
        wait_healthy(server)
        return asyncio.run(_measure(server, options, console))


async def _measure(server: Child, options: argparse.Namespace, console: Console) -> dict[str, Gaps]:
    measured: dict[str, Gaps] = {}
    async with make_client() as http:
        for name, disturb in _disturbances(options.readers).items():
            console.print(name, style="dim")
            gaps = measured[name] = Gaps()
            items = prompts(STREAMS, 60, STREAM_TOKENS, options.seed, name)
            async with _streams(http, server, items) as arrivals:
                await asyncio.sleep(SETTLE)
                begun = time.perf_counter()
                work = asyncio.create_task(_repeat(disturb, http, server.url, gaps))
                await asyncio.sleep(options.seconds)
                ended = time.perf_counter()
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                for times in arrivals:
                    # A stall that has not ended counts as far as it has come.
                    seen = [t for t in times if t >= begun] + [ended]
                    gaps.seconds += [late - soon for soon, late in pairwise(seen)][:-1] or [
                        ended - begun
                    ]
    return measured


async def _repeat(disturb: Disturbance, http: httpx.AsyncClient, url: str, gaps: Gaps) -> None:
    while True:
        await disturb(http, url, gaps)


@contextlib.asynccontextmanager
async def _streams(
    http: httpx.AsyncClient, server: Child, items: list[Item]
) -> AsyncIterator[list[list[float]]]:
    """Four running streams, and when each token of theirs came."""
    arrivals: list[list[float]] = [[] for _ in items]
    tasks = [
        asyncio.create_task(_read(http, server, item, times))
        for item, times in zip(items, arrivals, strict=True)
    ]
    while not all(arrivals):
        await asyncio.sleep(0.01)
    try:
        yield arrivals
    finally:
        broken = [task for task in tasks if task.done() and task.exception()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in broken:
            task.result()


async def _read(http: httpx.AsyncClient, server: Child, item: Item, times: list[float]) -> None:
    content = json.loads(body(item, "default_model", Wire(endpoint="completions")))
    content |= {"ignore_eos": True}
    events = Events()
    url = f"{server.url}/v1/completions"
    async with http.stream("POST", url, json=content) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise server.failed(f"HTTP {response.status_code}: {text}")
        async for received in response.aiter_raw():
            for event in events.feed(received):
                if event != DONE and (chunk := read_chunk(event)):
                    if chunk.error:
                        raise server.failed(chunk.error)
                    if chunk.text:
                        times.append(time.perf_counter())


def _disturbances(readers: int) -> dict[str, Disturbance]:
    words = [f"item number {i} of the list" for i in range(30_000)]
    grammar = "root ::= " + " | ".join(f'"{word}"' for word in words)
    asked = {"prompt": "Which one?", "max_tokens": 8}
    return {
        "nothing else": _nothing,
        "a 10 MB prompt": _posting({"prompt": _SENTENCE * 160_000}),
        "a 600 KB prompt": _posting({"prompt": _SENTENCE * 9_300}),
        "30,000 alternatives": _posting(asked | {"guided_grammar": grammar}),
        "20,000 choices": _posting(asked | {"guided_choice": words[:20_000]}),
        f"{readers} slow readers": _Readers(readers),
    }


async def _nothing(http: httpx.AsyncClient, url: str, gaps: Gaps) -> None:
    await asyncio.sleep(1.0)


def _posting(wanted: dict[str, object]) -> Disturbance:
    content = json.dumps(wanted).encode()

    async def disturb(http: httpx.AsyncClient, url: str, gaps: Gaps) -> None:
        answer = await http.post(f"{url}/v1/completions", content=content, headers=_HEADERS)
        gaps.answers[answer.status_code] = gaps.answers.get(answer.status_code, 0) + 1
        await asyncio.sleep(0.2)

    return disturb


class _Readers:
    """Clients that ask for a stream and never read it."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def __call__(self, http: httpx.AsyncClient, url: str, gaps: Gaps) -> None:
        asked = {"prompt": "Go on.", "max_tokens": READER_TOKENS, "stream": True, "logprobs": 5}
        data = json.dumps(asked | {"ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        port = httpx.URL(url).port
        assert port is not None
        with contextlib.ExitStack() as stack:
            for _ in range(self._count):
                reader = stack.enter_context(socket.socket())
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect(("127.0.0.1", port))
                reader.sendall(head.encode() + data)
                await asyncio.sleep(0)
            await asyncio.Event().wait()


def _report(console: Console, measured: dict[str, Gaps]) -> None:
    alone = next(iter(measured.values())).p99
    table = Table(title=f"{STREAMS} streams beside", title_justify="left", box=SIMPLE)
    for name in ("", "p50 gap, ms", "p99 gap, ms", "longest, ms", "p99 over alone", "answered"):
        table.add_column(name, justify="left" if not name else "right")
    for name, gaps in measured.items():
        table.add_row(
            name,
            f"{1000 * percentile(sorted(gaps.seconds), 0.5):.0f}",
            f"{1000 * gaps.p99:.0f}",
            f"{1000 * gaps.longest:.0f}",
            f"{gaps.p99 / alone:.2f}",
            ", ".join(f"{count} × {status}" for status, count in gaps.answers.items()),
        )
    console.print(table)
    for name, gaps in list(measured.items())[1:]:
        ratio = gaps.p99 / alone
        word = "[green]PASS[/]" if ratio <= AT_MOST else "[red]FAIL[/]"
        console.print(f"{word} {name}: {ratio:.2f} (at most {AT_MOST:g})", highlight=False)


if __name__ == "__main__":
    main()
