"""A request under way, as its reader sees it: tokens of the engine in, events of text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from millrace.protocol import PromptLogprobs, RowTokens
from millrace.serving.arrivals import Arrivals, EventSource
from millrace.serving.client import EngineClient
from millrace.serving.in_flight import InFlight, Phase
from millrace.text.deltas import Delta, Event, Idle, PromptScores, TextFinish, Usage
from millrace.text.pipeline import ChoicePipeline


class Running:
    """A request under way. Whoever holds it must close it, however it ends."""

    def __init__(
        self,
        client: EngineClient,
        active: InFlight,
        pipelines: list[ChoicePipeline],
        only_prompt: bool = False,
    ) -> None:
        self._only_prompt = only_prompt
        self._client = client
        self._active = active
        self._pipelines = pipelines
        self._report: Callable[[Usage], None] | None = None
        self._over = False

    def on_end(self, report: Callable[[Usage], None]) -> None:
        """`report` receives once what the request has cost, however it ends."""
        self._report = report

    @property
    def n(self) -> int:
        return len(self._pipelines)

    @property
    def phase(self) -> Phase:
        return self._active.phase

    @property
    def first_token(self) -> float | None:
        """When the first token came, on the monotonic clock."""
        return self._active.first_token

    @property
    def last_token(self) -> float:
        return self._active.last_token

    @property
    def usage(self) -> Usage:
        """What it has cost so far."""
        return Usage(
            prompt=len(self._active.submit.prompt),
            completion=0 if self._only_prompt else sum(p.tokens for p in self._pipelines),
            cached=self._active.cached,
            written=self._active.written,
            reasoning=sum(p.reasoning_tokens for p in self._pipelines),
        )

    def usage_of(self, choice: int) -> Usage:
        """The usage so far of the prompt that this choice answers."""
        return self.usage

    def close(self) -> None:
        self._active.close()
        self._tell()

    def _tell(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(self.usage)

    @property
    def source(self) -> EventSource:
        """What tells when there is something to read."""
        return self._active

    @property
    def is_over(self) -> bool:
        """Whether all of it was read."""
        return self._over

    def unread(self) -> Iterator[Event]:
        """What has come and was not read yet, what it cost at last; raises what went wrong."""
        for item in self._active.unread():
            match item:
                case RowTokens(choice=choice):
                    yield from self._row(choice, item)
                case PromptLogprobs(items=items):
                    yield PromptScores(0, items)
        if self._active.is_over and not self._over:
            self._over = True
            self._tell()
            yield self.usage

    def _row(self, choice: int, row: RowTokens) -> Iterator[Event]:
        pipeline = self._pipelines[choice]
        if pipeline.done:
            return
        for piece, logprobs, tokens in pipeline.feed(row):
            if not self._only_prompt:
                yield Delta(choice, piece, logprobs, tokens)
            elif isinstance(piece, TextFinish):
                yield Delta(choice, TextFinish("length"))
        if pipeline.done and row.finish is None:
            self._client.finish_choice(self._active, choice)

    async def events(self) -> AsyncIterator[Event]:
        arrivals = Arrivals([self._active])
        while not self._over:
            if await arrivals.next() is None:
                yield Idle()
            for event in self.unread():
                yield event
