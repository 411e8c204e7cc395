"""Gaps between tokens of running streams while a long prompt arrives, beside mlx_lm.server.

Four streams decode. After a while a prompt of some 4,000 tokens comes, and a second later one of
20. The 99th percentile of the streams' gaps while the long prompt is run is held against the one
before it came, and the short prompt must be answered before the long one. Both servers have the
same float32 model and our BLAS, wait side by side, and are measured one at a time, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from common import (
    Child,
    Stolen,
    child,
    default_model,
    float32_copy,
    free_port,
    our_blas,
    prompts,
    wait_healthy,
    warn_if_busy,
    with_blas,
)
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from millrace.bench.load import Wire, body, make_client
from millrace.bench.plot import check_plot
from millrace.bench.sse import DONE, Events, read_chunk
from millrace.bench.stats import percentile
from millrace.bench.workload import Item
from millrace.errors import MillraceError, SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, THEIRS = "millrace", "mlx_lm our BLAS"
STREAMS, STREAM_TOKENS = 4, 3000
LONG_TOKENS, SHORT_TOKENS, ANSWER = 4000, 20, 4
LONG_WISH = 3720
"""What the workload must be asked for to make so many of the default model's tokens."""
SETTLE, QUIET, LATER = 1.0, 10.0, 1.0
"""Seconds: until the streams run evenly, alone after that, and from the long prompt to the short."""
AT_MOST = 3.0
_PATIENCE = 900.0
_SHORT = "One, two, three, four, five, six, seven, eight, nine, ten,"


@dataclass
class Round:
    """Times of one round, in seconds after the first stream was sent."""

    tokens: list[list[float]]
    """When each stream's tokens came."""
    long_sent: float = 0.0
    long_first: float = 0.0
    short_sent: float = 0.0
    short_first: float = 0.0

    def gaps(self, begin: float, end: float) -> list[float]:
        """The streams' gaps that overlap a time."""
        return [
            late - soon
            for stream in self.tokens
            for soon, late in pairwise(stream)
            if late > begin and soon < end
        ]

    @property
    def without(self) -> list[float]:
        started = max(stream[0] for stream in self.tokens) + SETTLE
        # The last gap before the long prompt ends with a token that came before it.
        return [
            late - soon
            for stream in self.tokens
            for soon, late in pairwise(stream)
            if soon >= started and late <= self.long_sent
        ]

    @property
    def during(self) -> list[float]:
        return self.gaps(self.long_sent, self.long_first)


@dataclass
class Figures:
    """All rounds of one server."""

    rounds: list[Round] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    """The part of the cores' time that the host took in each, where that is told."""

    @property
    def without(self) -> list[float]:
        return sorted(gap for r in self.rounds for gap in r.without)

    @property
    def during(self) -> list[float]:
        return sorted(gap for r in self.rounds for gap in r.during)

    @property
    def ratio(self) -> float:
        return percentile(self.during, 0.99) / percentile(self.without, 0.99)

    @property
    def lead(self) -> float:
        """Seconds from the short prompt's first token to the long one's, in the worst round."""
        return min(r.long_first - r.short_first for r in self.rounds)


def main() -> None:
    options = _options()
    console = Console()
    try:
        if options.plot:
            check_plot(options.plot)
        measured = _run(options, console)
        if options.plot:
            _draw(options.plot, measured)
    except MillraceError as error:
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        sys.exit(1)
    _report(console, measured)
    if options.json:
        options.json.write_text(json.dumps(_as_json(measured), indent=2) + "\n")
        console.print(f"Figures: {options.json}", highlight=False)
    if options.plot:
        console.print(f"Plot: {options.plot}", highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=(OURS, THEIRS), help="leave the other out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--plot", type=Path, help="draw the gaps over time (.png or .svg)")
    return parser.parse_args()


def _run(options: argparse.Namespace, console: Console) -> dict[str, Figures]:
    blas = our_blas()
    model = float32_copy(options.model or default_model())
    warn_if_busy(console)
    with tempfile.TemporaryDirectory(prefix="bench-fairness-") as logs, ExitStack() as stack:
        servers = _start(stack, model, blas, Path(logs), options.only)
        measured = {name: Figures() for name in servers}
        for number in range(options.rounds):
            for name in list(servers)[:: -1 if number % 2 else 1]:
                console.print(f"round {number + 1}: {name}", style="dim")
                items = _items(options.seed, number)
                host, figures = Stolen(), measured[name]
                figures.rounds.append(asyncio.run(_Scenario(servers[name], items).run()))
                if (share := host.share()) is not None:
                    figures.stolen.append(share)
    return measured


def _start(
    stack: ExitStack, model: Path, blas: str | None, logs: Path, only: str | None
) -> dict[str, Child]:
    python = [sys.executable, "-m"]
    # Nothing from an earlier run may be found on disk.
    ours = [*python, "millrace", "serve", str(model), "--name", "default_model"]
    commands = {
        OURS: ([*ours, "--cache-disk", "0"], {}),
        THEIRS: ([*python, "mlx_lm", "server", "--model", str(model)], with_blas(blas)),
    }
    servers = {}
    for name, (command, env) in commands.items():
        if only in (None, name):
            port = free_port()
            servers[name] = stack.enter_context(
                child(name, [*command, "--port", str(port)], logs=logs, env=env, port=port)
            )
            wait_healthy(servers[name])
    return servers


def _items(seed: int, number: int) -> dict[str, list[Item]]:
    return {
        "warm-up": prompts(1, 40, 4, seed, f"warm-up/{number}"),
        "streams": prompts(STREAMS, 60, STREAM_TOKENS, seed, f"streams/{number}"),
        "long": prompts(1, LONG_WISH, ANSWER, seed, f"long/{number}"),
        "short": [Item(prompt=_SHORT, max_tokens=ANSWER)],
    }


class _Scenario:
    """One round against one server. The streams are cut off when the long prompt is answered."""

    def __init__(self, server: Child, items: dict[str, list[Item]]) -> None:
        self._server = server
        self._items = items
        self._begun = 0.0
        self._round = Round([[] for _ in range(STREAMS)])

    async def run(self) -> Round:
        async with make_client() as http:
            await self._read(http, self._items["warm-up"][0], lambda _: None)
            self._begun = time.perf_counter()
            streams = [
                asyncio.create_task(self._read(http, item, self._round.tokens[i].append))
                for i, item in enumerate(self._items["streams"])
            ]
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._disturb(http)
            except TimeoutError:
                raise self._server.failed(f"not done after {_PATIENCE:g} s.") from None
            ended = [task for task in streams if task.done()]
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        for task in ended:
            task.result()
            raise SetupError(f"A stream of {self._server.name} ended before the long prompt.")
        return self._round

    async def _disturb(self, http: httpx.AsyncClient) -> None:
        got = self._round
        while not all(got.tokens):
            await asyncio.sleep(0.01)
        await asyncio.sleep(SETTLE + QUIET)
        long: list[float] = []
        short: list[float] = []
        got.long_sent = self._now()
        slow = asyncio.create_task(self._read(http, self._items["long"][0], long.append))
        await asyncio.sleep(LATER)
        got.short_sent = self._now()
        await self._read(http, self._items["short"][0], short.append)
        await slow
        if not long or not short:
            raise self._server.failed("answered a prompt with no text.")
        got.long_first, got.short_first = long[0], short[0]

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    async def _read(
        self, http: httpx.AsyncClient, item: Item, arrived: Callable[[float], None]
    ) -> None:
        """One streamed request; tells when each piece of text came."""
        content = body(item, "default_model", Wire(endpoint="completions"))
        url = f"{self._server.url}/v1/completions"
        headers = {"content-type": "application/json"}
        events = Events()
        async with http.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise self._server.failed(f"HTTP {response.status_code}: {text}")
            async for received in response.aiter_raw():
                now = self._now()
                for event in events.feed(received):
                    if event != DONE and (chunk := read_chunk(event)):
                        if chunk.error:
                            raise self._server.failed(chunk.error)
                        if chunk.text:
                            arrived(now)


def _report(console: Console, measured: dict[str, Figures]) -> None:
    table = Table(
        title=f"{STREAMS} streams, a prompt of {LONG_TOKENS:,} tokens, and one of "
        f"{SHORT_TOKENS} a second later",
        title_justify="left",
        box=SIMPLE,
    )
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Figures], str]] = {
        "p50 gap without it, ms": lambda f: _ms(percentile(f.without, 0.5)),
        "p99 gap without it, ms": lambda f: _ms(percentile(f.without, 0.99)),
        "p50 gap while it is run, ms": lambda f: _ms(percentile(f.during, 0.5)),
        "p99 gap while it is run, ms": lambda f: _ms(percentile(f.during, 0.99)),
        "longest gap while it is run, ms": lambda f: _ms(f.during[-1]),
        "p99 with it over without": lambda f: f"{f.ratio:.2f}",
        "long prompt to its first token, s": lambda f: _seconds(f, "long"),
        "short prompt to its first token, s": lambda f: _seconds(f, "short"),
        "short before long by, s": lambda f: f"{f.lead:.2f}",
        "gaps counted, without and with": lambda f: f"{len(f.without)}, {len(f.during)}",
        "of the cores, the host took": lambda f: ", ".join(f"{s:.0%}" for s in f.stolen) or "?",
    }
    for name, show in rows.items():
        table.add_row(name, *(show(figures) for figures in measured.values()))
    console.print(table)
    if figures := measured.get(OURS):
        _verdict(
            console,
            figures.ratio <= AT_MOST,
            f"p99 ratio {figures.ratio:.2f} (at most {AT_MOST:g})",
        )
        _verdict(
            console,
            figures.lead > 0,
            f"the short prompt is answered {figures.lead:.2f} s before the long one",
        )


def _verdict(console: Console, passed: bool, text: str) -> None:
    word = "[green]PASS[/]" if passed else "[red]FAIL[/]"
    console.print(f"{word} {OURS}: {text}", highlight=False)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def _seconds(figures: Figures, which: str) -> str:
    waits = [getattr(r, f"{which}_first") - getattr(r, f"{which}_sent") for r in figures.rounds]
    return f"{sum(waits) / len(waits):.2f}"


def _draw(path: Path, measured: dict[str, Figures]) -> None:
    """Every gap of the first rounds as a dot, at the time of the token that ended it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1 + 3 * len(measured)), layout="constrained")
    panels = figure.subplots(len(measured), 1, sharey=True, squeeze=False)
    for axes, (name, figures) in zip(panels[:, 0], measured.items(), strict=True):
        _panel(axes, name, figures)
    panels[-1, 0].set_xlabel("seconds after the long prompt was sent")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SetupError(f"--plot {path} cannot be written: {error}.") from None


def _panel(axes: Axes, name: str, figures: Figures) -> None:
    shown = figures.rounds[0]
    for stream in shown.tokens:
        times = [late - shown.long_sent for late in stream[1:]]
        gaps = [1000 * (late - soon) for soon, late in pairwise(stream)]
        axes.plot(times, gaps, ".", markersize=3, color="#1f6f8b", alpha=0.6)
    axes.axvspan(0, shown.long_first - shown.long_sent, color="#e07a1f", alpha=0.1, lw=0)
    limit = 1000 * AT_MOST * percentile(sorted(shown.without), 0.99)
    axes.axhline(limit, color="#6b6b6b", lw=0.8, ls="--")
    axes.text(0.995, limit, f"{AT_MOST:g} × p99 without ", fontsize=8, ha="right", va="bottom",
              transform=axes.get_yaxis_transform())  # fmt: skip
    for label, at, colour in (
        ("short prompt sent", shown.short_sent, "#9b3f73"),
        ("its first token", shown.short_first, "#5b8c3a"),
    ):
        axes.axvline(at - shown.long_sent, color=colour, lw=1.2, label=label)
    axes.set_title(
        f"{name}: gaps between tokens of {STREAMS} streams; shaded: the long prompt is run",
        fontsize=10,
        loc="left",
    )
    axes.set_yscale("log")
    axes.set_ylabel("gap, ms")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _as_json(measured: dict[str, Figures]) -> dict[str, Any]:
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "servers": {
            name: {
                "p99_without_s": percentile(f.without, 0.99),
                "p99_with_s": percentile(f.during, 0.99),
                "max_with_s": f.during[-1],
                "ratio": f.ratio,
                "short_before_long_s": f.lead,
                "rounds": [asdict(r) for r in f.rounds],
            }
            for name, f in measured.items()
        },
    }


if __name__ == "__main__":
    main()
