"""POST /v1/chat/completions: wire request to Request, events to chunks or to one object."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import DONE, KEEP_ALIVE, EventStream, as_json, data, whole
from millrace.api.body import convert, read_object, refuse, unknown
from millrace.api.context import context_of, request_id
from millrace.api.errors import openai_error
from millrace.api.openai.common import (
    chat_logprobs,
    ignored_header,
    request_of,
    usage_of,
    wants_usage,
)
from millrace.api.openai.schema import REFUSED_BY_CHAT, ChatRequest, Message, known
from millrace.errors import BadRequest, Unsupported
from millrace.protocol import TokenLogprob
from millrace.serving.fold import Answer, fold
from millrace.serving.model import Running, ServedModel
from millrace.text.deltas import Content, Delta, Event, Finish, Idle, Usage

router = APIRouter()
_KNOWN = known(ChatRequest, REFUSED_BY_CHAT)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest) -> Response:
    context = context_of(http)
    raw = await read_object(http, context.config.max_body)
    wire = convert(raw, ChatRequest)
    refuse(raw, REFUSED_BY_CHAT)
    model = context.registry.get(wire.model)
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    id = request_id(http, "chatcmpl-")
    request = request_of(id, model.chat_prompt([_message(m) for m in wire.messages]), wire, model)
    request.max_tokens = wire.max_completion_tokens or wire.max_tokens
    request.logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    request.endpoint = "/v1/chat/completions"
    headers = {"x-request-id": id} | ignored_header(unknown(raw, _KNOWN))
    running = model.run(request)
    envelope = _Envelope(id, model, bool(wire.logprobs))
    if wire.stream:
        chunks = envelope.chunks(running, wants_usage(wire))
        return EventStream(chunks, running.close, lambda e: data(openai_error(e)), headers)
    answers, usage = await whole(http, fold(running.events(), running.n), running.close)
    return as_json(envelope.whole(answers, usage), headers)


def _message(message: Message) -> dict[str, Any]:
    value: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if message.name is not None:
        value["name"] = message.name
    return value


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text":
                raise Unsupported(
                    f"Content parts of type '{part.type}' are not supported by this server yet.",
                    param="messages",
                )
        return "".join(part.text or "" for part in message.content)
    if message.content is None:
        raise BadRequest(f"A message of role '{message.role}' has no content.", param="messages")
    return message.content


class _Envelope:
    """The wire objects of one chat answer."""

    def __init__(self, id: str, model: ServedModel, logprobs: bool) -> None:
        self._head = {"id": id, "created": int(time.time()), "model": model.name}
        self._vocabulary = model.tokenizer.vocabulary
        self._wants_logprobs = logprobs

    def _logprobs(self, items: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._vocabulary, items) if self._wants_logprobs else None

    def whole(self, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": a.content},
                    "logprobs": self._logprobs(a.logprobs),
                    "finish_reason": a.finish.reason if a.finish else None,
                    "matched_stop": a.finish.matched if a.finish else None,
                }
                for i, a in enumerate(answers)
            ],
            "usage": usage_of(usage),
        }

    async def chunks(self, running: Running, include_usage: bool) -> AsyncIterator[bytes]:
        for choice in range(running.n):
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async for event in running.events():
            if out := self._translate(event, include_usage):
                yield out
        yield DONE

    def _translate(self, event: Event, include_usage: bool) -> bytes | None:
        match event:
            case Delta(choice=choice, piece=Content(text=text), logprobs=scores):
                return self._chunk(choice, {"content": text}, scores)
            case Delta(choice=choice, piece=Finish() as finish, logprobs=scores):
                return self._chunk(choice, {}, scores, finish)
            case Usage() if include_usage:
                body = self._head | {"object": "chat.completion.chunk", "choices": []}
                return data(body | {"usage": usage_of(event)})
            case Idle():
                return KEEP_ALIVE
        return None

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
            "finish_reason": finish.reason if finish else None,
        }
        if finish is not None:
            body["matched_stop"] = finish.matched
        return data(self._head | {"object": "chat.completion.chunk", "choices": [body]})
