"""Agent conversations replayed turn by turn: what each server runs again, and how long one waits.

The conversations are real (tau-bench, airline); calls and results are written out as text, so that
every server and every template sees the same messages. A turn's history is what the real agent said,
whatever the model has just answered.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, Child
from rich.progress import Progress
from timed import ask

from millrace.errors import SetupError
from millrace.text.dialect import Conversation, Dialect
from millrace.text.tokenizer import Tokenizer

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    server: str
    conversation: int
    number: int
    """0 is the first."""
    seconds: float
    prompt_tokens: int
    run_tokens: int | None
    new_tokens: int
    """Those in neither the last prompt nor its answer."""


def material(name: str) -> Path:
    """A file of real data, which is no part of this project."""
    base = Path(os.environ.get("MILLRACE_MATERIAL", HERE.parents[1] / "shared" / "material"))
    file = base / "data" / name
    if not file.is_file():
        raise SetupError(f"There is no {file}; name the folder with MILLRACE_MATERIAL.")
    return file


def conversations(count: int) -> list[list[Message]]:
    """One conversation of each of the first tasks."""
    with gzip.open(material("taubench_gpt-4o-airline_trajectories.json.gz")) as stored:
        found = {entry["task_id"]: entry["traj"] for entry in reversed(json.load(stored))}
    return [list(map(_plain, found[task])) for task in sorted(found)[:count]]


def _plain(message: Message) -> Message:
    """With calls and results as text."""
    text = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    for call in message.get("tool_calls") or ():
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        text += f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
    return {"role": message["role"], "content": text}


class Replay:
    def __init__(self, model: Path, window: int, turns: int, answer: int) -> None:
        self._tokenizer = Tokenizer(model)
        self._dialect = Dialect(self._tokenizer)
        self._window = window
        self._turns = turns
        self._answer = answer

    def run(
        self, servers: Sequence[Child], talks: list[list[Message]], progress: Progress
    ) -> list[Turn]:
        """Conversation by conversation, the servers in turn."""
        bar = progress.add_task("trace", total=len(talks) * len(servers))
        found: list[Turn] = []
        for number, talk in enumerate(talks):
            first = number % len(servers)
            for server in (*servers[first:], *servers[:first]):
                progress.update(bar, description=f"conversation {number + 1} · {server.name}")
                own = list(self._replay(server, number, talk))
                waited = sum(t.seconds for t in own)
                progress.console.print(
                    f"conversation {number + 1} · {server.name}: {len(own)} turns, {waited:.1f} s "
                    "to their first tokens",
                    highlight=False,
                )
                found += own
                progress.advance(bar)
        return found

    def _replay(self, server: Child, conversation: int, talk: list[Message]) -> Iterator[Turn]:
        before: list[int] = []
        for number, messages in enumerate(self._histories(talk)):
            prompt = self._prompt(messages)
            if len(prompt) + self._answer > self._window:
                return
            body = {"messages": messages, "max_tokens": self._answer}
            timed = ask(server, "/v1/chat/completions", body)
            if timed.prompt_tokens != len(prompt):
                raise server.failed(
                    f"counts {timed.prompt_tokens} tokens of a prompt of {len(prompt)}."
                )
            yield Turn(
                server.name,
                conversation,
                number,
                timed.seconds,
                len(prompt),
                timed.run_tokens,
                len(prompt) - _common(before, prompt),
            )
            before = [*prompt, *self._tokenizer.encode(timed.text)]

    def _histories(self, talk: list[Message]) -> Iterator[list[Message]]:
        ends = [i for i, m in enumerate(talk) if m["role"] == "assistant"]
        return (talk[:end] for end in ends[: self._turns])

    def _prompt(self, messages: list[Message]) -> list[int]:
        return self._tokenizer.encode(self._dialect.render(Conversation(messages)))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Summary:
    """One server's turns after the first of each conversation."""

    turns: int
    prompt_tokens: int
    new_tokens: int
    run_tokens: int | None
    median: float
    p90: float

    @property
    def ratio(self) -> float | None:
        return None if self.run_tokens is None else self.run_tokens / self.new_tokens


def summary(turns: Sequence[Turn]) -> Summary:
    later = [t for t in turns if t.number]
    run = [t.run_tokens for t in later]
    waits = sorted(t.seconds for t in later)
    return Summary(
        len(later),
        sum(t.prompt_tokens for t in later),
        sum(t.new_tokens for t in later),
        None if None in run else sum(r or 0 for r in run),
        statistics.median(waits),
        waits[int(0.9 * (len(waits) - 1))],
    )
