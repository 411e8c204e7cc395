"""POST /v1/messages and /v1/messages/count_tokens: one way to the prompt for both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, whole
from millrace.api.anthropic.blocks import Blocks, Folding
from millrace.api.anthropic.events import Count, MessageAnswer, StreamEvent, encoded, error_event
from millrace.api.anthropic.prepare import PreparedRequest, prepare
from millrace.api.anthropic.schema import (
    ADVISORY,
    REFUSED,
    MessagesRequest,
    PromptFields,
    ThinkingOn,
)
from millrace.api.context import request_id
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.prelude import Asked, Border
from millrace.api.running import run
from millrace.api.stripped_header import note
from millrace.errors import BadRequest
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.running import Running
from millrace.serving.sampling_fields import fill, sampling_fields
from millrace.text.conversation import Conversation
from millrace.text.tasks import PromptLength

T = TypeVar("T")
P = TypeVar("P", bound=PromptFields)
router = APIRouter()
_BORDER = Border(MessagesRequest, REFUSED, ADVISORY)
# Who counts may send all that he will send to be answered.
_COUNTING = Border(
    PromptFields, REFUSED, ADVISORY | frozenset(MessagesRequest.__struct_fields__), loads=False
)
_HERE = {"stop": "stop_sequences"}


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
    asked = await _BORDER.read(http)
    wire, model = asked.wire, asked.model
    if isinstance(wire.thinking, ThinkingOn) and wire.thinking.budget_tokens >= wire.max_tokens:
        raise BadRequest(
            "thinking.budget_tokens must be less than max_tokens.", param="thinking.budget_tokens"
        )
    request, headers = await _prepared(http, asked, _request)
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
    body=PromptFields,
    answer=Count,
    statuses=(400, 404, 413, 415, 429),
)
async def count_tokens(http: HttpRequest) -> Response:
    asked = await _COUNTING.read(http)
    count, headers = await _prepared(http, asked, _count)
    note(http.scope, count.stripped)
    return as_json(Count(count.tokens), headers)


def _request(asked: Asked[MessagesRequest], id: str, ready: PreparedRequest) -> Request:
    request = asked.model.chat(id, ready.chat, ready.demand)
    return fill(request, sampling_fields(asked.wire, stop="stop_sequences"), asked.model, _HERE)


def _count(asked: Asked[PromptFields], id: str, ready: PreparedRequest) -> PromptLength:
    return asked.model.count(ready.chat, ready.demand)


async def _prepared(
    http: HttpRequest, asked: Asked[P], work: Callable[[Asked[P], str, PreparedRequest], T]
) -> tuple[T, dict[str, str]]:
    """What is made of the prompt, and the headers of the response."""
    id = request_id(http, "msg_")

    ready = PreparedRequest(Conversation([]))

    def build() -> Conversation:
        nonlocal ready
        ready = prepare(asked.wire, asked.model.dialect)
        return ready.chat

    found = await prepared(asked.model.pictures, build, lambda _: work(asked, id, ready))
    return found, {"request-id": id} | asked.headers(id, ready.ignored)


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
