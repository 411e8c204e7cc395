"""The pieces of an answer as LocalAI's Replies: a stream of deltas that repeats nothing, or one whole."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from millrace.protocol import TokenLogprob
from millrace.rpc.localai import wire
from millrace.serving.fold import fold
from millrace.serving.running import Running
from millrace.text.deltas import (
    Content,
    Delta,
    Piece,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from millrace.text.vocabulary import Vocabulary


class _Entry(msgspec.Struct):
    """A token as the logprobs' JSON has it."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class _Token(_Entry):
    top_logprobs: list[_Entry]


class Replies:
    """One answer's way onto the wire."""

    def __init__(self, running: Running, vocabulary: Vocabulary, *, logprobs: bool) -> None:
        self._running = running
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._began = time.monotonic()

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 where there were no more."""
        first, made = self._running.first_token, self._running.usage.completion
        seconds = self._running.last_token - first if first is not None else 0.0
        return (made - 1) / seconds if made > 1 and seconds > 0 else 0.0

    async def streamed(self) -> AsyncIterator[Any]:
        scores: list[TokenLogprob] = []
        async for event in self._running.events():
            match event:
                case Delta(piece=piece, logprobs=items):
                    scores += items
                    if isinstance(piece, TextFinish):
                        continue
                    text = piece.text if isinstance(piece, Content) else ""
                    yield wire.Reply(message=text.encode(), chat_deltas=[_delta(piece)])
                case Usage() as usage:
                    yield self._ended(usage, scores)

    async def whole(self) -> Any:
        answers, usage = await fold(self._running.events(), 1)
        answer = answers[0]
        reply = self._ended(usage, answer.logprobs)
        reply.message = answer.content.encode()
        delta = reply.chat_deltas.add(content=answer.content, reasoning_content=answer.reasoning)
        for index, call in enumerate(answer.calls):
            delta.tool_calls.add(index=index, id=call.id, name=call.name, arguments=call.arguments)
        return reply

    def _ended(self, usage: Usage, scores: Sequence[TokenLogprob]) -> Any:
        """What is known at the end: counts, milliseconds, and all logprobs."""
        first = self._running.first_token or time.monotonic()
        reply = wire.Reply(
            tokens=usage.completion,
            prompt_tokens=usage.prompt,
            timing_prompt_processing=1000 * (first - self._began),
            timing_token_generation=1000 * max(0.0, self._running.last_token - first),
        )
        if self._logprobs:
            content = [self._token(item) for item in scores]
            reply.logprobs = msgspec.json.encode({"content": content})
        return reply

    def _token(self, item: TokenLogprob) -> _Token:
        own = self._entry(item.token, item.logprob)
        top = [self._entry(token, value) for token, value in item.top]
        return _Token(own.id, own.token, own.bytes, own.logprob, top)

    def _entry(self, token: int, logprob: float) -> _Entry:
        raw = self._vocabulary.bytes_of(token)
        return _Entry(token, raw.decode("utf-8", "replace"), list(raw), logprob)


def _delta(piece: Piece) -> Any:
    match piece:
        case Content(text=text):
            return wire.ChatDelta(content=text)
        case Reasoning(text=text):
            return wire.ChatDelta(reasoning_content=text)
        case ToolCallStart(index=index, id=id, name=name):
            call = wire.ToolCallDelta(index=index, id=id, name=name)
        case ToolCallArguments(index=index, text=text):
            call = wire.ToolCallDelta(index=index, arguments=text)
    return wire.ChatDelta(tool_calls=[call])
