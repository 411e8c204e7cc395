"""POST /api/chat and /api/generate."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, whole
from millrace.api.callers import need_admin
from millrace.api.context import context_of, request_id
from millrace.api.leases import kept_for
from millrace.api.ollama import delete, embed, library, pull
from millrace.api.ollama.context import after, followed
from millrace.api.ollama.lines import NDJSON, error_line, now
from millrace.api.ollama.messages import shown, turns_of
from millrace.api.ollama.options import check_options, demanded, place
from millrace.api.ollama.parts import OllamaPart, Shape, as_message, as_response
from millrace.api.ollama.response import Clock, OllamaResponse
from millrace.api.ollama.schema import (
    REFUSED_BY_CHAT,
    REFUSED_BY_GENERATE,
    OllamaChatRequest,
    OllamaCommon,
    OllamaGenerateRequest,
)
from millrace.api.openai.tools import offered
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border, ignored_header
from millrace.api.running import run
from millrace.errors import BadRequest
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.text.conversation import Conversation, ConversationTurn

router = APIRouter()
router.include_router(library.router)
router.include_router(delete.router)
router.include_router(embed.router)
router.include_router(pull.router)

T = TypeVar("T", bound=OllamaCommon)


def _lets_go(wire: OllamaCommon) -> bool:
    """Whether it is told to let go of the model; one that asks for nothing else loads nothing."""
    return wire.keep_alive is not None and kept_for(wire) == 0


_CHAT = Border(
    OllamaChatRequest,
    REFUSED_BY_CHAT,
    loads=lambda w: bool(w.messages) or not _lets_go(w),
    asks=lambda w: bool(w.messages),
)
_GENERATE = Border(
    OllamaGenerateRequest,
    REFUSED_BY_GENERATE,
    loads=lambda w: bool(w.prompt) or not _lets_go(w),
    asks=lambda w: bool(w.prompt),
)


@router.post("/api/chat")
@describe("ollama", "Answer a conversation", body=OllamaChatRequest, stream=NDJSON, statuses=RUNS)
async def chat(http: HttpRequest) -> Response:
    clock = Clock()
    wire, model, ignored = await _read(http, _CHAT)
    if not wire.messages:
        return await _opened(http, wire, model, as_message, ignored)
    chosen = offered(wire.tools or [], wire.tool_choice)
    ignored += chosen.ignored
    id, messages = request_id(http, "ollama-"), wire.messages

    def build() -> Conversation:
        conversation = Conversation(
            messages=turns_of(messages),
            tools=chosen.functions,
            tool_choice=chosen.choice,
            tool_name=chosen.name,
            continue_final=_goes_on(wire),
        )
        return _thinking(conversation, wire, model)

    def finish(chat: Conversation) -> Request:
        ignored.extend(_deaf(chat, model))
        return model.chat(id, chat, demanded(wire.format))

    request = await prepared(model.pictures, build, finish)
    return await _answer(http, wire, model, request, as_message, clock, ignored)


@router.post("/api/generate")
@describe("ollama", "Answer a prompt", body=OllamaGenerateRequest, stream=NDJSON, statuses=RUNS)
async def generate(http: HttpRequest) -> Response:
    clock = Clock()
    wire, model, ignored = await _read(http, _GENERATE)
    if not wire.prompt:
        return await _opened(http, wire, model, as_response, ignored)
    id, prompt = request_id(http, "ollama-"), wire.prompt
    demand = demanded(wire.format)
    if wire.raw:
        if wire.system or wire.context or wire.think or wire.images:
            raise BadRequest(
                "raw takes the prompt as it is: no system, context, think or images with it."
            )
        request = Request(
            id=id,
            prompt=await asyncio.to_thread(model.text_prompt, prompt),
            grammar=await asyncio.to_thread(model.form, demand),
        )
        return await _answer(http, wire, model, request, as_response, clock, ignored)
    messages = [ConversationTurn("system", wire.system)] if wire.system else []
    messages.append(ConversationTurn("user", shown(prompt, wire.images, "images")))
    if wire.context and wire.images:
        raise BadRequest(
            "A context holds no pictures: send the whole conversation to /api/chat.", param="images"
        )
    conversation = _thinking(Conversation(messages=messages), wire, model)
    request = await prepared(
        model.pictures, lambda: conversation, lambda chat: model.chat(id, chat, demand)
    )
    if wire.context:
        request.prompt = await asyncio.to_thread(followed, wire.context, conversation, model)
        # They were those of the prompt without its past.
        request.boundaries, request.head, request.tail = [], 0, None
    ignored += _deaf(conversation, model)
    # Tokens alone cannot tell which pictures they stood for.
    remember = not wire.images
    return await _answer(http, wire, model, request, as_response, clock, ignored, remember=remember)


async def _read(http: HttpRequest, border: Border[T]) -> tuple[T, ServedModel, list[str]]:
    asked = await border.read(http)
    return asked.wire, asked.model, asked.ignored + check_options(asked.raw)


def _goes_on(wire: OllamaChatRequest) -> bool:
    """An answer of the assistant's at the end is one to be continued."""
    last = (wire.messages or [])[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _thinking(chat: Conversation, wire: OllamaCommon, model: ServedModel) -> Conversation:
    if wire.think is None:
        return chat
    form = model.dialect.format
    if wire.think and form.thought is None and form.messages is None:
        raise BadRequest(f'"{wire.model or model.name}" does not support thinking.', param="think")
    chat.thinking = bool(wire.think)
    chat.effort = wire.think if isinstance(wire.think, str) else None
    return chat


def _deaf(chat: Conversation, model: ServedModel) -> list[str]:
    return ["think"] if model.dialect.ignored(chat) else []


async def _answer(
    http: HttpRequest,
    wire: OllamaCommon,
    model: ServedModel,
    request: Request,
    shape: Shape,
    clock: Clock,
    ignored: list[str],
    remember: bool = False,
) -> Response:
    ignored = ignored + place(request, wire, model)
    headers = {"x-request-id": request.id} | ignored_header(ignored)
    clock.prepared()
    running = run(http, model, request)
    response = OllamaResponse(
        wire.model or model.name,
        shape,
        running,
        clock,
        model,
        lambda r: after(request.prompt, r.tokens, r.finish, model) if remember else None,
    )
    if wire.stream is not False:
        return EventStream(response.stream(), running.close, error_line, headers, NDJSON)
    return as_json(await whole(http, response.whole(), running.close), headers)


async def _opened(
    http: HttpRequest, wire: OllamaCommon, model: ServedModel, shape: Shape, ignored: list[str]
) -> Response:
    """Without anything to answer, the request is to load the model, or to let go of it."""
    if _lets_go(wire):
        need_admin(http, "Unloading a model")
        await context_of(http).registry.unload(model.name, wait=False)
    else:
        await whole(http, model.client.settled(), lambda: None)
    body = {"model": wire.model or model.name, "created_at": now(), **shape(OllamaPart())}
    reason = "unload" if _lets_go(wire) else "load"
    return as_json(body | {"done": True, "done_reason": reason}, ignored_header(ignored))
