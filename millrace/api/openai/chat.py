"""POST /v1/chat/completions: wire request to Request, events to chunks or to one object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import DONE, KEEP_ALIVE, EventStream, as_json, data, whole
from millrace.api.body import convert, read_object, refuse, unknown
from millrace.api.context import context_of, request_id
from millrace.api.errors import openai_error
from millrace.api.openai.common import (
    chat_logprobs,
    demanded,
    fill,
    usage_of,
    wants_usage,
)
from millrace.api.openai.schema import REFUSED_BY_CHAT, ChatRequest, Message, NamedTool, known
from millrace.api.running import run
from millrace.api.sampling import ignored_header
from millrace.errors import BadRequest, Unsupported
from millrace.protocol import TokenLogprob
from millrace.serving.fold import Answer, fold
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
from millrace.text.dialect import Conversation, ToolChoice

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
    chat, entry = _conversation(raw, wire), demanded(wire)
    request = await asyncio.to_thread(model.chat, id, chat, entry)
    fill(request, wire, model)
    request.max_tokens = wire.max_completion_tokens or wire.max_tokens
    request.logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    headers = {"x-request-id": id} | ignored_header(unknown(raw, _KNOWN))
    running = run(http, model, request)
    envelope = _Envelope(id, model, bool(wire.logprobs))
    if wire.stream:
        chunks = envelope.chunks(running, wants_usage(wire))
        return EventStream(chunks, running.close, lambda e: data(openai_error(e)), headers)
    answers, usage = await whole(http, fold(running.events(), running.n), running.close)
    return as_json(envelope.whole(answers, usage), headers)


def _conversation(raw: dict[str, Any], wire: ChatRequest) -> Conversation:
    for message in wire.messages:
        _check(message)
    named = wire.tool_choice if isinstance(wire.tool_choice, NamedTool) else None
    choice = "required" if named else wire.tool_choice or "auto"
    return Conversation(
        messages=raw["messages"],
        tools=wire.tools or [],
        tool_choice=cast(ToolChoice, choice),
        tool_name=named.function.name if named else None,
        parallel=wire.parallel_tool_calls is not False,
        thinking=wire.enable_thinking,
        effort=wire.reasoning_effort,
        thinking_budget=wire.thinking_token_budget,
        template_arguments=wire.chat_template_kwargs or {},
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final=bool(wire.continue_final_message),
    )


def _check(message: Message) -> None:
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"A message of role '{message.role}' has no content.", param="messages")
    for part in message.content if isinstance(message.content, list) else []:
        if part.type not in ("text", "refusal"):
            raise Unsupported(
                f"Content parts of type '{part.type}' are not supported by this server yet.",
                param="messages",
            )


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
                    "message": _whole_message(a),
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
            case Delta(choice=choice, piece=Reasoning(text=text), logprobs=scores):
                return self._chunk(choice, {"reasoning_content": text}, scores)
            case Delta(choice=choice, piece=ToolCallStart() as call, logprobs=scores):
                function = {"name": call.name, "arguments": ""}
                start = {"index": call.index, "id": call.id, "type": "function"}
                return self._chunk(choice, {"tool_calls": [start | {"function": function}]}, scores)
            case Delta(choice=choice, piece=ToolCallArguments() as part, logprobs=scores):
                piece = {"index": part.index, "function": {"arguments": part.text}}
                return self._chunk(choice, {"tool_calls": [piece]}, scores)
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


def _whole_message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message
