"""Prefill: one prompt on its way into the batch, run chunk by chunk on a cache of its own.

The last token is never run here: it is the row's first input in the batch step, which draws the
next token. A pre-empted row comes back the same way, and finds in the cache what it had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from millrace.cache.prefix import Ticket
from millrace.engine.grammar import Grammars
from millrace.engine.logprobs import Logprobs
from millrace.engine.row import Row
from millrace.protocol import HitKind, Submit, TokenLogprob

ALIKE = 64
"""Prompts with this many tokens in common are not run side by side."""
_LOGPROB_CHUNK = 128
"""Logits of a whole chunk are wide: prompts that want logprobs are run in small ones."""

Forward = Callable[[Any, mx.array, list[Any]], mx.array]
"""Runs a chunk of tokens through a model on top of caches; returns its logits."""


def whole(model: Any, chunk: mx.array, caches: list[Any]) -> mx.array:
    """A chunk as one run."""
    logits: mx.array = model(chunk, cache=caches)
    return logits


@dataclass(eq=False)
class Job:
    """The rows that continue one and the same run of tokens."""

    request: Submit
    rows: list[Row]
    tokens: list[int]
    arrived: float = 0.0
    done: int = 0
    cached: int = 0
    caches: list[Any] = field(default_factory=list)
    groupable: bool = False
    """Whether the model's state can be cut into rows after a run of several prompts."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    known: int = 0
    """Tokens whose state is expected to be found when it starts."""
    hit: HitKind = "none"
    written: int = 0
    """Prompt tokens that were run here and are kept for others."""
    ticket: Ticket | None = None
    """State that is being read for it."""
    pauses: list[int] = field(default_factory=list)
    """Places where state that cannot be cut is to be kept, so that a chunk must end there."""

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def left(self) -> int:
        return len(self.tokens) - 1 - (self.done or self.known)

    @property
    def reach(self) -> int:
        """Tokens until the next place where it must pause."""
        return next((p - self.done for p in self.pauses if p > self.done), self.left)

    @property
    def blocked(self) -> bool:
        return self.ticket is not None and not self.ticket.done

    def resembles(self, other: Job) -> bool:
        """Whether the other begins alike, so that one should wait for what the other computes."""
        n = ALIKE
        return self.tokens[:n] == other.tokens[:n] and self.salt == other.salt

    @property
    def salt(self) -> str:
        return self.request.cache_salt

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return len(self.rows)

    def narrow(self) -> Self:
        rest = type(self)(self.request, self.rows[1:], self.tokens, self.arrived)
        rest.groupable = self.groupable
        self.rows = self.rows[:1]
        return rest

    @property
    def fresh(self) -> bool:
        begun = self.done or self.known or self.caches
        return self.groupable and not begun and not self.wants_logprobs

    @property
    def wants_logprobs(self) -> bool:
        return self.request.prompt_logprobs is not None and not self.rows[0].generated

    def open(self, model: Any) -> None:
        """Make the cache that the prompt runs on."""
        if not self.caches:
            self.caches = make_prompt_cache(model)

    def run(self, model: Any, count: int, forward: Forward = whole) -> None:
        """Launch the next `count` tokens."""
        end = self.done + count
        while self.done < end:
            stop = min(end, self.done + _LOGPROB_CHUNK) if self.wants_logprobs else end
            self._run_to(model, stop, forward)

    def wait(self) -> None:
        mx.eval([c.state for c in self.caches])

    def _run_to(self, model: Any, end: int, forward: Forward) -> None:
        begin = self.done
        self.open(model)
        logits = forward(model, mx.array([self.tokens[begin:end]], mx.int32), self.caches)
        self.done = end
        mx.async_eval([c.state for c in self.caches])
        if self.wants_logprobs:
            top = self.request.prompt_logprobs or 0
            follow = mx.array(self.tokens[begin + 1 : end + 1], mx.int32)
            self.logprobs += Logprobs(logits[0], follow, top).read([top] * (end - begin))


def groupable(caches: list[Any]) -> bool:
    return all(type(c) is KVCache for c in caches)


def run_together(model: Any, jobs: list[Job], count: int, forward: Forward = whole) -> None:
    """Launch the first `count` tokens of several prompts as one.

    What stands after the end of a shorter one is cut off again: nothing before it looks there.
    """
    shared = make_prompt_cache(model)
    runs = [job.tokens[: min(count, job.left)] for job in jobs]
    padded = [run + [0] * (count - len(run)) for run in runs]
    forward(model, mx.array(padded, mx.int32), shared)
    for i, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        job.caches = [_row(cache, i, len(run)) for cache in shared]
        job.done = len(run)
    mx.async_eval([c.state for job in jobs for c in job.caches])


def _row(shared: KVCache, index: int, length: int) -> KVCache:
    cache = KVCache()
    cache.keys = mx.contiguous(shared.keys[index : index + 1, :, :length])
    cache.values = mx.contiguous(shared.values[index : index + 1, :, :length])
    cache.offset = length
    return cache


def jobs_of(
    request: Submit, now: float, grammars: Grammars | None = None, groupable: bool = False
) -> list[Job]:
    """A request's choices, grouped by what they have already made: usually one job."""
    groups: dict[tuple[int, ...], list[Row]] = {}
    for choice in request.choices:
        groups.setdefault(tuple(choice.generated), []).append(
            Row.of(request, choice, now, grammars)
        )
    return [
        Job(request, rows, [*request.prompt, *generated], now, groupable=groupable)
        for generated, rows in groups.items()
    ]


def job_of(row: Row) -> Job:
    """A row that had to leave the batch, ready to come back."""
    return Job(row.request, [row], [*row.request.prompt, *row.tokens], row.arrived)
