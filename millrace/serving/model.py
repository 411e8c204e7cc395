"""A model as the protocols see it: messages or text in, a stream of events out."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from millrace.engine.rng import derive
from millrace.errors import BadRequest, ContextLengthExceeded
from millrace.protocol import Choice, PromptLogprobs, RowTokens, Submit
from millrace.serving.client import EngineClient
from millrace.serving.live import Live
from millrace.serving.request import Request
from millrace.text.deltas import Delta, Event, Idle, PromptScores, Usage
from millrace.text.pipeline import ChoicePipeline
from millrace.text.template import ChatTemplate
from millrace.text.tokenizer import Tokenizer


class ServedModel:
    def __init__(self, name: str, tokenizer: Tokenizer, client: EngineClient, window: int) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.client = client
        self.window = window
        self.created = int(time.time())

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults that the model's authors recommend."""
        file = self.tokenizer.folder / "generation_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        wanted = ("temperature", "top_p", "top_k", "min_p")
        return {k: settings[k] for k in wanted if settings.get(k) is not None}

    @functools.cached_property
    def template(self) -> ChatTemplate:
        source = self.tokenizer.template_source
        if source is None:
            raise BadRequest(
                f"The model '{self.name}' has no chat template; use /v1/completions.",
                param="messages",
            )
        return ChatTemplate(
            source,
            bos_token=self.tokenizer.token_text("bos_token"),
            eos_token=self.tokenizer.token_text("eos_token"),
        )

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.tokenizer.encode(self.template.render(messages, **kwargs))

    def text_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=True)

    def budget(self, request: Request) -> int:
        """How many tokens the request may make; raises if its prompt alone is too long."""
        if not request.prompt:
            raise BadRequest("The prompt is empty.", param="prompt")
        left = self.window - len(request.prompt)
        if left < 1:
            raise ContextLengthExceeded(len(request.prompt), self.window)
        return left if request.max_tokens is None else min(left, request.max_tokens)

    def run(self, request: Request) -> Running:
        """Hand the request to the engine; raises at once what is wrong with it."""
        seed = secrets.randbits(63) if request.seed is None else request.seed
        ends = frozenset() if request.ignore_eos else self.tokenizer.eos_ids
        submit = Submit(
            id=request.id,
            prompt=request.prompt,
            choices=[Choice(k, derive(seed, k) if k else seed) for k in range(request.n)],
            max_tokens=self.budget(request),
            sampling=request.sampling,
            stop_ids=sorted(ends | set(request.stop_token_ids)),
            priority=request.priority,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
        pipelines = [
            ChoicePipeline(
                self.tokenizer.vocabulary,
                stop_token_ids=request.stop_token_ids,
                skip_special=request.skip_special_tokens,
            )
            for _ in submit.choices
        ]
        live = self.client.submit(submit, endpoint=request.endpoint, timeout=request.timeout)
        return Running(live, pipelines)


class Running:
    """A request under way. Whoever holds it must close it, however it ends."""

    def __init__(self, live: Live, pipelines: list[ChoicePipeline]) -> None:
        self._live = live
        self._pipelines = pipelines

    @property
    def n(self) -> int:
        return len(self._pipelines)

    def close(self) -> None:
        self._live.close()

    async def events(self) -> AsyncIterator[Event]:
        live = self._live
        async for item in live.items():
            match item:
                case RowTokens():
                    for piece, logprobs in self._pipelines[item.choice].feed(item):
                        yield Delta(item.choice, piece, logprobs)
                case PromptLogprobs(items=items):
                    yield PromptScores(0, items)
                case Idle():
                    yield item
        yield Usage(prompt=len(live.submit.prompt), completion=live.tokens_made, cached=live.cached)
