"""Prefill: one prompt on its way into the batch, run chunk by chunk on a cache of its own.

The last token is never run here: it is the row's first input in the batch step, which draws the
first new token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from millrace.engine.row import Row
from millrace.protocol import Submit


@dataclass(eq=False)
class Job:
    """The rows that continue one and the same run of tokens."""

    request: Submit
    rows: list[Row]
    tokens: list[int]
    done: int = 0
    cached: int = 0
    caches: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens still to run before the rows can join the batch."""
        return len(self.tokens) - 1 - self.done

    def open(self, model: Any) -> None:
        """Make the cache that the prompt runs on."""
        if not self.caches:
            self.caches = make_prompt_cache(model)

    def run(self, model: Any, count: int) -> None:
        """Launch the next `count` tokens."""
        self.open(model)
        chunk = mx.array([self.tokens[self.done : self.done + count]], mx.int32)
        model(chunk, cache=self.caches)
        mx.async_eval([c.state for c in self.caches])
        self.done += count


def jobs_of(request: Submit) -> list[Job]:
    """A request's choices, grouped by what they have already made: usually one job."""
    groups: dict[tuple[int, ...], list[Row]] = {}
    for choice in request.choices:
        groups.setdefault(tuple(choice.made), []).append(Row.of(request, choice))
    return [
        Job(request=request, rows=rows, tokens=[*request.prompt, *made])
        for made, rows in groups.items()
    ]
