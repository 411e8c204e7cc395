"""Gaps between tokens of four streams while others send what is large, or do not read.

Four streams decode, first alone, and then beside one of: nothing, which shows what the machine's own noise
is, a prompt of ten megabytes, one that is just short enough to be tokenised, a grammar of 30,000
alternatives, a list of 20,000 choices, and 200 clients that ask for streams, with and without reading them.
Each comes again and again while its time lasts, from another process, so that the gaps are the server's.
Every gap of the streams is held against the 99th percentile of the same streams before. What the host took
of the cores meanwhile is told: such gaps are not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from common import (
    Child,
    Stolen,
    child,
    default_model,
    free_port,
    prompts,
    wait_healthy,
    warn_if_busy,
)
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


@dataclass
class Gaps:
    """The streams' gaps before and during one disturbance."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)
    """How the disturbing requests were answered, by status."""
    stolen: float | None = None
    """The part of the cores' time that the host took, where that is told."""

    @property
    def p99_alone(self) -> float:
        return percentile(sorted(self.alone), 0.99)

    @property
    def p99(self) -> float:
        return percentile(sorted(self.beside), 0.99)

    @property
    def ratio(self) -> float:
        return self.p99 / self.p99_alone

    @property
    def longer(self) -> int:
        """Gaps that are longer than any should be."""
        return sum(gap > AT_MOST * self.p99_alone for gap in self.beside)


Disturbance = Callable[[str, Gaps], Awaitable[None]]


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
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of each measurement; half as long alone"
    )
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="those with such a word in their name"
    )
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
            if options.only and not any(word in name for word in options.only):
                continue
            console.print(name, style="dim")
            gaps = measured[name] = Gaps()
            items = prompts(STREAMS, 60, STREAM_TOKENS, options.seed, name)
            async with _streams(http, server, items) as arrivals:
                await asyncio.sleep(SETTLE)
                host = Stolen()
                gaps.alone = await _watched(arrivals, options.seconds / 2)
                work = asyncio.create_task(_repeat(disturb, server.url, gaps))
                gaps.beside = await _watched(arrivals, options.seconds)
                gaps.stolen = host.share()
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
    return measured


async def _watched(arrivals: list[list[float]], seconds: float) -> list[float]:
    """All streams' gaps of so many seconds from now on."""
    begun = time.perf_counter()
    await asyncio.sleep(seconds)
    ended = time.perf_counter()
    gaps: list[float] = []
    for times in arrivals:
        # A stall that has not ended counts as far as it has come.
        seen = [t for t in times if t >= begun] + [ended]
        gaps += [late - soon for soon, late in pairwise(seen)][:-1] or [ended - begun]
    return gaps


async def _repeat(disturb: Disturbance, url: str, gaps: Gaps) -> None:
    while True:
        await disturb(url, gaps)


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
        "nothing": _nothing,
        "a 10 MB prompt": _posting({"prompt": _SENTENCE * 160_000}),
        "a 600 KB prompt": _posting({"prompt": _SENTENCE * 9_300}),
        "30,000 alternatives": _posting(asked | {"guided_grammar": grammar}),
        "20,000 choices": _posting(asked | {"guided_choice": words[:20_000]}),
        f"{readers} readers": _Readers(readers, reads=True),
        f"{readers} slow readers": _Readers(readers, reads=False),
    }


async def _nothing(url: str, gaps: Gaps) -> None:
    await asyncio.Event().wait()


def _posting(wanted: dict[str, object]) -> Disturbance:
    content = json.dumps(wanted).encode()

    async def disturb(url: str, gaps: Gaps) -> None:
        async with _elsewhere(_SENDER, url) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(content)
            process.stdin.close()
            while line := await process.stdout.readline():
                status = int(line)
                gaps.answers[status] = gaps.answers.get(status, 0) + 1

    return disturb


_SENDER = """
import http.client, sys, time, urllib.parse
body, place = sys.stdin.buffer.read(), urllib.parse.urlsplit(sys.argv[1])
while True:
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=300)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    print(connection.getresponse().status, flush=True)
    connection.close()
    time.sleep(0.2)
"""
_READER = """
import socket, sys, threading, urllib.parse
body, place = sys.stdin.buffer.read(), urllib.parse.urlsplit(sys.argv[1])
head = f"POST /generate HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
readers = []
for _ in range(int(sys.argv[2])):
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((place.hostname, place.port))
    reader.sendall(head + body)
    readers.append(reader)
def read(reader):
    while reader.recv(65536):
        pass
if sys.argv[3] == "reads":
    for reader in readers:
        threading.Thread(target=read, args=(reader,), daemon=True).start()
threading.Event().wait()
"""


@contextlib.asynccontextmanager
async def _elsewhere(code: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


class _Readers:
    """Clients that ask for a stream, and read it or do not."""

    def __init__(self, count: int, *, reads: bool) -> None:
        self._count = count
        self._reads = "reads" if reads else "does not"

    async def __call__(self, url: str, gaps: Gaps) -> None:
        sampling = {"max_new_tokens": READER_TOKENS, "ignore_eos": True}
        # Every event repeats the text before it, so that buffers are full soon.
        asked = {"text": "Go on.", "stream": True, "sampling_params": sampling}
        async with _elsewhere(_READER, url, str(self._count), self._reads) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked).encode())
            process.stdin.close()
            await process.wait()


def _report(console: Console, measured: dict[str, Gaps]) -> None:
    table = Table(title=f"{STREAMS} streams beside", title_justify="left", box=SIMPLE)
    names = ("p99 alone", "p50 gap, ms", "p99 gap, ms", "longest, ms", "p99s", "taken", "answered")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name, gaps in measured.items():
        table.add_row(
            name,
            f"{1000 * gaps.p99_alone:.0f}",
            f"{1000 * percentile(sorted(gaps.beside), 0.5):.0f}",
            f"{1000 * gaps.p99:.0f}",
            f"{1000 * max(gaps.beside):.0f}",
            f"{gaps.ratio:.2f}",
            "" if gaps.stolen is None else f"{gaps.stolen:.0%}",
            ", ".join(f"{count} × {status}" for status, count in gaps.answers.items()),
        )
    console.print(table)
    for name, gaps in measured.items():
        word = "[red]FAIL[/]" if gaps.longer else "[green]PASS[/]"
        longest = max(gaps.beside) / gaps.p99_alone
        console.print(
            f"{word} {name}: the longest gap is {longest:.2f} times the 99th percentile alone (at most "
            f"{AT_MOST:g}), {gaps.longer:,} of {len(gaps.beside):,} are longer than that; the 99th "
            f"percentile {gaps.ratio:.2f} times",
            highlight=False,
        )


if __name__ == "__main__":
    main()
