"""A request on its way: what it asked, what it has made, and the queue its answer flows through.

This is what a resume needs: prompt and made tokens are all an engine must be told to go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from millrace.errors import MillraceError
from millrace.protocol import Choice, Prefilled, RowTokens, Submit
from millrace.text.deltas import Idle

Phase = Literal["queued", "prefill", "decode"]


class Live:
    def __init__(self, submit: Submit, abandon: Callable[[Live], None], idle: float) -> None:
        self.submit = submit
        self.made: dict[int, list[int]] = {c.index: list(c.made) for c in submit.choices}
        self.open = set(self.made)
        """The choices that have not finished."""
        self.prefilled = 0
        self.cached = 0
        self.deaths = 0
        """Engines that ended while they ran this request."""
        self.running = False
        """Handed to the engine that is up now."""
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.resumes = 0
        self._queue: asyncio.Queue[RowTokens | MillraceError] = asyncio.Queue()
        self._abandon = abandon
        self._idle = idle

    @property
    def id(self) -> str:
        return self.submit.id

    @property
    def tokens_made(self) -> int:
        return sum(map(len, self.made.values()))

    @property
    def phase(self) -> Phase:
        if self.first_token is not None:
            return "decode"
        return "prefill" if self.prefilled else "queued"

    def remainder(self) -> Submit:
        """What is left to do, as a request to an engine that knows nothing of it."""
        choices = [
            Choice(c.index, c.seed, list(self.made[c.index]))
            for c in self.submit.choices
            if c.index in self.open
        ]
        first = self.submit
        return Submit(
            id=first.id,
            prompt=first.prompt,
            choices=choices,
            max_tokens=first.max_tokens,
            sampling=first.sampling,
            stop_ids=first.stop_ids,
        )

    def progress(self, step: Prefilled) -> None:
        self.prefilled = step.done
        self.cached = max(self.cached, step.cached)

    def take(self, row: RowTokens) -> None:
        if row.choice not in self.open:
            return
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.made[row.choice] += row.tokens
        if row.finish is not None:
            self.open.discard(row.choice)
        self._queue.put_nowait(row)

    def fail(self, error: MillraceError) -> None:
        self.open.clear()
        self._queue.put_nowait(error)

    def close_choice(self, choice: int) -> None:
        self.open.discard(choice)

    def close(self) -> None:
        """Nobody listens any more."""
        self._abandon(self)

    async def rows(self) -> AsyncIterator[RowTokens | Idle]:
        """The answer as it is made, until every choice is finished; raises what went wrong."""
        while self.open or not self._queue.empty():
            try:
                item = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    async with asyncio.timeout(self._idle):
                        item = await self._queue.get()
                except TimeoutError:
                    yield Idle()
                    continue
            if isinstance(item, MillraceError):
                raise item
            yield item
