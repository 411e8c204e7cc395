"""The wire objects of a chat answer: one whole, or chunks as its events come."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from millrace.api.answer import DONE, KEEP_ALIVE, data
from millrace.api.openai.common import chat_logprobs, usage_of
from millrace.api.openai.tools import Calls, Offer
from millrace.protocol import TokenLogprob
from millrace.serving.fold import Answer
from millrace.serving.model import Running, ServedModel
from millrace.text.deltas import (
    Content,
    Delta,
    Event,
    Finish,
    Idle,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)


class Envelope:
    def __init__(self, id: str, model: ServedModel, logprobs: bool, offer: Offer) -> None:
        self._head = {"id": id, "created": int(time.time()), "model": model.name}
        self._vocabulary = model.tokenizer.vocabulary
        self._wants_logprobs = logprobs
        self._offer = offer
        self._calls: dict[int, Calls] = {}

    def whole(self, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": i,
                    "message": self._message(a),
                    "logprobs": self._logprobs(a.logprobs),
                    "finish_reason": self._reason(a.finish) if a.finish else None,
                    "matched_stop": a.finish.matched if a.finish else None,
                }
                for i, a in enumerate(answers)
            ],
            "usage": usage_of(usage),
        }

    def _message(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            listed = [Calls(self._offer).whole(c.id, c.name, c.arguments) for c in answer.calls]
            if self._offer.legacy:
                message["function_call"] = listed[0]["function"]
            else:
                message["tool_calls"] = listed
        return message

    async def chunks(self, running: Running, include_usage: bool) -> AsyncIterator[bytes]:
        for choice in range(running.n):
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async for event in running.events():
            if out := self._translate(event, include_usage):
                yield out
        yield DONE

    def _translate(self, event: Event, include_usage: bool) -> bytes | None:
        match event:
            case Delta(choice=choice, piece=Finish() as finish, logprobs=scores):
                late = [self._chunk(choice, rest) for rest in self._of(choice).rest()]
                return b"".join([*late, self._chunk(choice, {}, scores, finish)])
            case Delta(choice=choice, logprobs=scores):
                return self._chunk(choice, self._delta(event), scores)
            case Usage() if include_usage:
                body = self._head | {"object": "chat.completion.chunk", "choices": []}
                return data(body | {"usage": usage_of(event)})
            case Idle():
                return KEEP_ALIVE
        return None

    def _delta(self, event: Delta) -> dict[str, Any]:
        match event.piece:
            case Content(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return {"reasoning_content": text}
            case ToolCallStart(index=index, id=id, name=name):
                return self._of(event.choice).start(index, id, name)
            case ToolCallArguments(index=index, text=text):
                return self._of(event.choice).piece(index, text)
            case Finish():
                return {}

    def _of(self, choice: int) -> Calls:
        return self._calls.setdefault(choice, Calls(self._offer))

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        scores: list[TokenLogprob] | None = None,
        finish: Finish | None = None,
    ) -> bytes:
        body: dict[str, Any] = {
            "index": choice,
            "delta": delta,
            "logprobs": self._logprobs(scores) if scores else None,
            "finish_reason": self._reason(finish) if finish else None,
        }
        if finish is not None:
            body["matched_stop"] = finish.matched
        return data(self._head | {"object": "chat.completion.chunk", "choices": [body]})

    def _logprobs(self, items: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._vocabulary, items) if self._wants_logprobs else None

    def _reason(self, finish: Finish) -> str:
        if finish.reason == "tool_calls" and self._offer.legacy:
            return "function_call"
        return finish.reason
