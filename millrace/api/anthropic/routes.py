"""POST /v1/messages and /v1/messages/count_tokens: one way to the prompt for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, whole
from millrace.api.anthropic.blocks import Blocks, Folding
from millrace.api.anthropic.events import Count, MessageAnswer, StreamEvent, encoded, error_event
from millrace.api.anthropic.prepare import PreparedRequest, prepare
from millrace.api.anthropic.schema import KNOWN, REFUSED, MessagesRequest, Prompt, ThinkingOn
from millrace.api.body import convert, read_object, refuse, unknown
from millrace.api.context import context_of, request_id
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.running import run
from millrace.api.sampling import ignored_header, sampling_of
from millrace.api.stripped import note
from millrace.errors import BadRequest
from millrace.protocol import Sampling
from millrace.serving.model import Running, ServedModel
from millrace.serving.request import Request, seed_of
from millrace.text.stops import parse_stops
from millrace.text.tasks import PromptLength

T = TypeVar("T")
router = APIRouter()
_SAMPLING = tuple(f for f in Sampling.__struct_fields__ if f != "logit_bias")


@router.post("/v1/messages")
@describe(
    "anthropic",
    "Answer a conversation",
    body=MessagesRequest,
    answer=MessageAnswer,
    stream=SSE,
    event=StreamEvent,
    statuses=RUNS,
)
async def messages(http: HttpRequest) -> Response:
    raw = await read_object(http, context_of(http).config.max_body)
    wire = convert(raw, MessagesRequest)
    if isinstance(wire.thinking, ThinkingOn) and wire.thinking.budget_tokens >= wire.max_tokens:
        raise BadRequest(
            "thinking.budget_tokens must be less than max_tokens.", param="thinking.budget_tokens"
        )
    model, request, headers = await _prepared(http, raw, wire, _asked)
    _fill(request, wire, model)
    running = run(http, model, request)
    hidden = wire.thinking is not None and wire.thinking.display == "omitted"
    blocks = Blocks(request.id, model.name, shows_thoughts=not hidden)
    if wire.stream:
        return EventStream(_stream(running, blocks), running.close, error_event, headers)
    return as_json(await whole(http, _folded(running, blocks), running.close), headers)


@router.post("/v1/messages/count_tokens")
@describe(
    "anthropic",
    "Count a conversation's tokens",
    body=Prompt,
    answer=Count,
    statuses=(400, 404, 413),
)
async def count_tokens(http: HttpRequest) -> Response:
    raw = await read_object(http, context_of(http).config.max_body)

    def counted(model: ServedModel, id: str, ready: PreparedRequest) -> PromptLength:
        return model.count(ready.chat, ready.demand)

    _, count, headers = await _prepared(http, raw, convert(raw, Prompt), counted)
    note(http.scope, count.stripped)
    return as_json(Count(count.tokens), headers)


def _asked(model: ServedModel, id: str, ready: PreparedRequest) -> Request:
    return model.chat(id, ready.chat, ready.demand)


async def _prepared(
    http: HttpRequest,
    raw: dict[str, Any],
    wire: Prompt,
    work: Callable[[ServedModel, str, PreparedRequest], T],
) -> tuple[ServedModel, T, dict[str, str]]:
    """The model, what is made of the prompt, and the headers of the response."""
    refuse(raw, REFUSED)
    model = context_of(http).registry.get(wire.model)
    id = request_id(http, "msg_")

    def prepared() -> tuple[T, list[str]]:
        ready = prepare(wire, model.dialect)
        return work(model, id, ready), ready.ignored

    found, ignored = await asyncio.to_thread(prepared)
    headers = {"x-request-id": id, "request-id": id}
    return model, found, headers | ignored_header([*unknown(raw, KNOWN), *ignored])


def _fill(request: Request, wire: MessagesRequest, model: ServedModel) -> None:
    asked = {name: getattr(wire, name) for name in _SAMPLING}
    request.sampling = sampling_of(asked, model, wire.logit_bias)
    request.seed = seed_of(wire.seed)
    request.max_tokens = wire.max_tokens
    request.stops = parse_stops(wire.stop_sequences, "stop_sequences")
    request.stop_in_reasoning = bool(wire.stop_in_reasoning)
    request.ignore_eos = bool(wire.ignore_eos)
    request.priority = wire.priority or 0
    request.timeout = wire.timeout
    request.cache_salt = wire.cache_salt or ""


async def _stream(running: Running, blocks: Blocks) -> AsyncIterator[bytes]:
    async for event in running.events():
        for out in blocks.feed(event, running.usage):
            yield encoded(out)


async def _folded(running: Running, blocks: Blocks) -> MessageAnswer:
    folding = Folding()
    async for event in running.events():
        for out in blocks.feed(event, running.usage):
            folding.add(out)
    return folding.message
