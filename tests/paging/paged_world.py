"""Sequences on a paged model, a step at a time: they come while others run, in chunks, and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from millrace.paging.model import Batching, PagedModel
from millrace.paging.passes import Run, flat_pass, run_pass
from millrace.paging.pool import PagePool
from millrace.paging.table import PageTable

PAGE = 4


@dataclass(eq=False)
class Answer:
    """A prompt and what follows it, greedily."""

    number: int
    tokens: list[int]
    length: int
    tables: list[PageTable]
    done: int = 0
    made: list[int] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)


class PagedWorld:
    def __init__(self, model: Any, pages: int = 256) -> None:
        self.model = PagedModel(model, page=PAGE, pages=pages)
        self.pools = [PagePool(pages) for _ in self.model.windows]
        self.running: list[Answer] = []
        self._numbers = 0

    def begin(self, prompt: Sequence[int], length: int) -> Answer:
        tables = [
            PageTable(pool, PAGE, window)
            for pool, window in zip(self.pools, self.model.windows, strict=True)
        ]
        self._numbers += 1
        answer = Answer(self._numbers, list(prompt), length, tables)
        self.running.append(answer)
        return answer

    def step(self, chunk: int = 7) -> None:
        """All sequences go on: by a token, or by a chunk of their prompt."""
        runs = [(a, min(chunk, len(a.tokens) - a.done)) for a in self.running]
        batching = self.model.batching
        if batching is Batching.FLAT:
            self._pass(runs, padding=3)
            return
        rows = [r for r in runs if r[1] == 1 and r[0].done] if batching is Batching.ROWS else []
        if rows:
            self._pass(rows)
        for run in runs:
            if run not in rows:
                self._pass([run])

    def _pass(self, group: list[tuple[Answer, int]], padding: int = 0) -> None:
        runs, tokens, last = [], [], []
        for place, (answer, count) in enumerate(group):
            for table in answer.tables:
                table.extend(count)
            runs.append(Run(place, answer.done, count))
            tokens += answer.tokens[answer.done : answer.done + count]
            last.append(len(tokens) - 1)
        tables = [[a.tables[g].pages for a, _ in group] for g in range(len(self.pools))]
        if len(group) == 1 and not padding:
            at, inputs = run_pass(runs[0], tables, PAGE), mx.array([tokens], mx.int32)
        else:
            at = flat_pass(runs, tables, PAGE, tokens=len(tokens) + padding)
            inputs = mx.array([*tokens, *[0] * padding], mx.int32)[:, None]
        names = [answer.number for answer, _ in group]
        logits = self.model.run(inputs, at, names, mx.array(last, mx.int32))
        mx.eval(logits, [layer.state for layer in (*self.model.paged, *self.model.states)])
        for (answer, count), scores in zip(group, logits, strict=True):
            self._advance(answer, count, scores)

    def _advance(self, answer: Answer, count: int, scores: mx.array) -> None:
        answer.done += count
        for table in answer.tables:
            table.pass_window()
        if answer.done < len(answer.tokens):
            return
        token = int(mx.argmax(scores).item())
        answer.logits.append(scores)
        answer.made.append(token)
        answer.tokens.append(token)
        if len(answer.made) == answer.length:
            self.end(answer)

    def end(self, answer: Answer) -> None:
        self.running.remove(answer)
        self.model.drop(answer.number)
        for table in answer.tables:
            table.release()


def alone(model: Any, prompt: Sequence[int], length: int) -> tuple[list[int], mx.array]:
    """What the model itself makes of a prompt, on caches of mlx-lm's."""
    caches = make_prompt_cache(model)
    tokens, made, logits = list(prompt), [], []
    for _ in range(length):
        scores = model(mx.array([tokens]), cache=caches)[0, -1]
        logits.append(scores)
        tokens = [int(mx.argmax(scores).item())]
        made += tokens
    return made, mx.stack(logits)
