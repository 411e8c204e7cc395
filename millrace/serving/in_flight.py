"""A request on its way: what it asked, what it has generated, and the queue its answer waits in.

This is what a resume needs: prompt and generated tokens are all an engine must be told to go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from millrace.errors import MillraceError
from millrace.protocol import Choice, Prefilled, PromptLogprobs, RowTokens, Submit
from millrace.protocol.specprefill import Scoring, Selected
from millrace.serving.engine_request import EngineRequest, Outcome, Phase

__all__ = ["InFlight", "Outcome", "Phase"]

Item = RowTokens | PromptLogprobs


MOST_QUEUED = 64
"""Steps whose tokens wait one by one for a reader; beyond, those of a choice are put together."""


class InFlight(EngineRequest):
    """A request for text."""

    def __init__(
        self,
        id: str,
        submit: Submit,
        abandon: Callable[[InFlight], None],
        *,
        idle: float,
        endpoint: str = "",
        caller: str = "",
    ) -> None:
        self.submit = submit
        self.picture: Callable[[str], Awaitable[memoryview]] | None = None
        """One of the request's pictures by its digest, as the message that the engine is sent."""
        self.generated: dict[int, list[int]] = {c.index: list(c.generated) for c in submit.choices}
        super().__init__(id, submit.id, set(self.generated), abandon, endpoint, caller)
        self.selected: Selected | None = None
        """What stays of the prompt, where a draft has chosen."""
        self.chosen = 0.0
        """When it had."""
        self._scored = False
        self._queue: deque[Item | MillraceError] = deque()
        self._last: dict[int, RowTokens] = {}
        """What was queued last for each choice."""
        self.idle = idle
        """Seconds without anything to read after which a reader is to be told so."""
        self.on_arrival: Callable[[], None] = lambda: None
        """Called when there is something to read, or nothing more to come."""

    @property
    def adapter(self) -> int:
        return self.submit.adapter

    @property
    def answers(self) -> int:
        return len(self.open)

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.prompt)

    @property
    def tokens_generated(self) -> int:
        return sum(map(len, self.generated.values()))

    @property
    def max_tokens(self) -> int:
        return self.submit.max_tokens

    @property
    def priority(self) -> int:
        return self.submit.priority

    def begin(self, behind: float = 0.0, *, apart: bool = False) -> Submit:
        self.running = True
        self.prefilled = self.scored = 0
        choices = [
            Choice(c.index, c.seed, list(self.generated[c.index]))
            for c in self.submit.choices
            if c.index in self.open
        ]
        return msgspec.structs.replace(self.submit, choices=choices, behind=behind, apart=apart)

    def progress(self, step: Prefilled) -> int:
        """Note how far the prompt is; returns the tokens that were run for it since the last."""
        run = max(0, step.done - max(self.prefilled, step.cached))
        self.prefilled = step.done
        if self.first_token is not None:
            # It had to leave the batch and comes back: what it finds of itself was not a find.
            return run
        self.cached = max(self.cached, step.cached)
        self.written = max(self.written, step.written)
        if step.hit != "none":
            self.hit = step.hit
        return run

    def choose(self, selected: Scoring | Selected) -> Selected | None:
        """Note how far the draft is, and what stays of the prompt: so that it stays after a resume, too.
        Returns what was chosen."""
        if isinstance(selected, Scoring):
            self.scored = selected.done
            return None
        if self.selected is None:
            self.chosen = time.monotonic()
        self.selected, self.scored = selected, selected.scored
        assert self.submit.sparse is not None
        sparse = msgspec.structs.replace(self.submit.sparse, kept=selected.kept)
        self.submit = msgspec.structs.replace(self.submit, sparse=sparse)
        return selected

    @property
    def sparse(self) -> dict[str, Any] | None:
        found = self.selected
        if found is None:
            return None
        first = self.first_token
        return {
            "scored_tokens": found.scored,
            "draft_tokens": found.run,
            "kept_tokens": sum(end - begin for begin, end in found.kept),
            "total_tokens": self.prompt_tokens,
            "scoring_seconds": round(found.seconds, 3),
            "prefill_seconds": round(first - self.chosen, 3) if first is not None else None,
        }

    def take(self, row: RowTokens) -> None:
        if row.choice not in self.open:
            return
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token
        self.generated[row.choice] += row.tokens
        if row.finish is not None:
            self.finish = row.finish
            self.open.discard(row.choice)
        if len(self._queue) >= MOST_QUEUED and (last := self._last.get(row.choice)):
            # Nobody reads: what comes is added to what waits, so that only tokens are kept.
            last.tokens += row.tokens
            last.logprobs += row.logprobs
            last.finish = row.finish
            return
        self._last[row.choice] = row
        self._put(row)

    def scores(self, prompt: PromptLogprobs) -> None:
        if not self._scored:
            self._scored = True
            self._put(prompt)

    def fail(self, error: MillraceError) -> None:
        self.open.clear()
        self._put(error)

    def _put(self, item: Item | MillraceError) -> None:
        self._queue.append(item)
        self.on_arrival()

    @property
    def is_over(self) -> bool:
        """Whether every choice is finished, and all of it was read."""
        return not self.open and not self._queue

    def unread(self) -> Iterator[Item]:
        """What has come and was not read yet; raises what went wrong."""
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, MillraceError):
                raise item
            if isinstance(item, RowTokens) and self._last.get(item.choice) is item:
                del self._last[item.choice]
            yield item
