"""Prefill and decode at 1, 4 and 8 rows, ours over HTTP beside mlx-lm in a process of its own, in turns.

Both get the same tokens at once and make as many. Prefill lasts until every row has its first token,
decode from then on; ratios are of medians of rounds in one run.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from millrace.errors import SetupError
from millrace.prove.beside import BatchOrder, BatchReply, Timed
from millrace.prove.equalities import Doing, Reference, lines_of
from millrace.prove.processes import ChildProcess, child
from millrace.prove.questions import ProvedAnswer, Question, QuestionSettings, text_of
from millrace.prove.report import ReportLine
from millrace.prove.served import Served

ROWS = (1, 4, 8)
_SAME_SECONDS = 20.0
"""After which no further answer of mlx-lm's is asked for; without a GPU it takes long."""


class PlainModel:
    """mlx-lm, loaded and waiting."""

    def __init__(self, process: ChildProcess) -> None:
        self._child = process
        since = time.perf_counter()
        self._hear()
        self.started_in = time.perf_counter() - since
        """Seconds for importing mlx-lm and loading the model."""
        self.note = self._hear().note

    def order(self, order: BatchOrder) -> BatchReply:
        pipe = self._child.process.stdin
        if pipe is None:
            raise self._child.failed("has no pipes.")
        try:
            pipe.write(msgspec.json.encode(order).decode() + "\n")
            pipe.flush()
        except (BrokenPipeError, ValueError):
            raise self._child.failed("ended early.") from None
        return self._hear()

    def _hear(self) -> BatchReply:
        pipe = self._child.process.stdout
        line = pipe.readline() if pipe else ""
        if not line:
            raise self._child.failed("ended early.")
        return msgspec.json.decode(line, type=BatchReply)


@contextlib.contextmanager
def beside(folder: Path, weights: str, *, room: Path) -> Iterator[PlainModel]:
    words = ("millrace.prove.beside", str(folder), weights)
    with child("mlx-lm", *words, room=room, talks=True) as process:
        yield PlainModel(process)


def same_as_mlx_lm(other: PlainModel, reference: Reference, doing: Doing) -> list[ReportLine]:
    """Our answers alone beside those of mlx-lm's own loop, at temperature 0."""
    at = [i for i in reference.first(4) if reference.questions[i].seed is None]
    answers = list[ProvedAnswer]()
    deadline = time.monotonic() + _SAME_SECONDS
    for n, i in enumerate(at):
        if answers and time.monotonic() > deadline:
            break
        doing(f"mlx-lm alone: answer {n + 1} of {len(at)}")
        question = reference.questions[i]
        found = other.order(BatchOrder([question.ids], question.tokens)).answers
        answers.append(ProvedAnswer(found[0]))
    return lines_of("alone as mlx-lm", reference, at[: len(answers)], answers)[:1]


def measure(
    server: Served, other: PlainModel | None, settings: QuestionSettings, doing: Doing
) -> list[ReportLine]:
    """Rounds of both in turn, until the time for them is over."""
    contenders: dict[str, Callable[[list[list[int]]], Timed]] = {
        "ours": lambda prompts: _ours(server, prompts, settings.speed_tokens)
    }
    if other is not None:
        contenders["mlx-lm"] = lambda prompts: _theirs(other, prompts, settings.speed_tokens)
    times: dict[tuple[str, int], list[Timed]] = {}
    names = list(contenders)
    for rows in ROWS:  # unmeasured: what a shape costs the first time
        for name in names:
            doing(f"speed: {rows} rows, {name}, warming up")
            contenders[name](_prompts(server, settings, rows, "warm"))
    deadline = time.monotonic() + settings.speed_seconds
    for number in range(settings.rounds):
        if number and time.monotonic() > deadline:
            break
        for rows in ROWS:
            prompts = _prompts(server, settings, rows, str(number))
            for name in names[number % len(names) :] + names[: number % len(names)]:
                doing(f"speed: round {number + 1}, {rows} rows, {name}")
                times.setdefault((name, rows), []).append(contenders[name](prompts))
    return [_line(kind, rows, times, settings) for kind in ("prefill", "decode") for rows in ROWS]


def _line(
    kind: str, rows: int, times: dict[tuple[str, int], list[Timed]], settings: QuestionSettings
) -> ReportLine:
    speeds = {
        name: statistics.median(
            rows * settings.speed_prompt / t.prefill
            if kind == "prefill"
            else t.after / max(t.decode, 1e-9)
            for t in found
        )
        for (name, n), found in times.items()
        if n == rows
    }
    told = f"{speeds['ours']:,.0f} tokens/s"
    figures: dict[str, float | int | str | None] = {"ours": speeds["ours"]}
    if "mlx-lm" in speeds:
        ratio = speeds["ours"] / speeds["mlx-lm"]
        told += f"; mlx-lm {speeds['mlx-lm']:,.0f}; ratio {ratio:.2f}"
        figures |= {"mlx_lm": speeds["mlx-lm"], "ratio": ratio}
    rounds = len(times["ours", rows])
    figures["rounds"] = rounds
    row = "row" if rows == 1 else "rows"
    told += f" ({rounds} {'round' if rounds == 1 else 'rounds'})"
    return ReportLine(check=f"{kind}, {rows} {row}", verdict="told", detail=told, figures=figures)


def _prompts(server: Served, settings: QuestionSettings, rows: int, stream: str) -> list[list[int]]:
    return [
        text_of(f"speed/{stream}/{rows}/{i}", settings.speed_prompt, server.tokenize)
        for i in range(rows)
    ]


def _theirs(other: PlainModel, prompts: list[list[int]], tokens: int) -> Timed:
    timed = other.order(BatchOrder(prompts, tokens, timed=True)).timed
    if timed is None:
        raise SetupError("mlx-lm gave no times.")
    return timed


def _ours(server: Served, prompts: list[list[int]], tokens: int) -> Timed:
    """From when all are sent at once to the first and the last token of all, as a client sees them."""
    events: list[list[tuple[int, float]]] = [[] for _ in prompts]
    begins: list[float] = []

    def one(n: int) -> Callable[[threading.Barrier], ProvedAnswer]:
        def ask(barrier: threading.Barrier) -> ProvedAnswer:
            barrier.wait()
            begins.append(time.perf_counter())
            return server.stream(
                Question(prompts[n], tokens),
                salt="speed",
                seen=lambda count, now: events[n].append((count, now)),
            )

        return ask

    server.together([one(n) for n in range(len(prompts))])
    begin = min(begins)
    full = max(row[0][1] for row in events)
    end = max(row[-1][1] for row in events)
    before = sum(max((count for count, now in row if now <= full), default=0) for row in events)
    return Timed(full - begin, end - full, len(prompts) * tokens - before)
