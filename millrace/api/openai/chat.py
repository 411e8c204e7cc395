"""POST /v1/chat/completions: the wire request made into a Request, and its answer sent."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, data, whole
from millrace.api.body import convert, read_object, refuse, unknown
from millrace.api.context import context_of, request_id
from millrace.api.errors import openai_error
from millrace.api.openai.answers import ChatChunk, ChatCompletion
from millrace.api.openai.chat_answer import Envelope
from millrace.api.openai.common import demanded, fill, wants_usage
from millrace.api.openai.schema import REFUSED_BY_CHAT, ChatRequest, OpenAIMessage, known
from millrace.api.openai.tools import Offer, offer_of, spoken
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.running import run
from millrace.api.sampling import ignored_header
from millrace.errors import BadRequest, Unsupported
from millrace.serving.fold import fold
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.text.dialect import Conversation, Dialect

router = APIRouter()
_KNOWN = known(ChatRequest, REFUSED_BY_CHAT)
_HERE = {"thinking": "enable_thinking", "effort": "reasoning_effort"}
"""A conversation's fields as this protocol calls them."""


@router.post("/v1/chat/completions")
@describe(
    "openai",
    "Answer a conversation",
    body=ChatRequest,
    answer=ChatCompletion,
    stream=SSE,
    event=ChatChunk,
    statuses=RUNS,
)
async def chat_completions(http: HttpRequest) -> Response:
    context = context_of(http)
    raw = await read_object(http, context.config.max_body)
    wire = convert(raw, ChatRequest)
    refuse(raw, REFUSED_BY_CHAT)
    model = context.registry.get(wire.model)
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    id = request_id(http, "chatcmpl-")
    offer = offer_of(wire)
    request, ignored = await asyncio.to_thread(_request, id, raw, wire, offer, model)
    headers = {"x-request-id": id} | ignored_header([*unknown(raw, _KNOWN), *ignored])
    running = run(http, model, request)
    envelope = Envelope(id, model, bool(wire.logprobs), offer)
    if wire.stream:
        chunks = envelope.chunks(running, wants_usage(wire))
        return EventStream(chunks, running.close, lambda e: data(openai_error(e)), headers)
    answers, usage = await whole(http, fold(running.events(), running.n), running.close)
    return as_json(envelope.whole(answers, usage), headers)


def _request(
    id: str, raw: dict[str, Any], wire: ChatRequest, offer: Offer, model: ServedModel
) -> tuple[Request, list[str]]:
    """The request, and the names of what was left out of it."""
    chat = conversation_of(raw, wire, offer, model.dialect)
    request = model.chat(id, chat, demanded(wire))
    fill(request, wire, model)
    request.max_tokens = wire.max_completion_tokens or wire.max_tokens
    request.logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    ignored = [*offer.ignored, *(_HERE[name] for name in model.dialect.ignored(chat))]
    if wire.web_search_options is not None:
        ignored.append("web_search_options")
    strange = model.dialect.unknown_arguments(wire.chat_template_kwargs or {})
    return request, ignored + [f"chat_template_kwargs.{name}" for name in strange]


def conversation_of(
    raw: dict[str, Any], wire: ChatRequest, offer: Offer, dialect: Dialect
) -> Conversation:
    for message in wire.messages:
        _check(message)
    return Conversation(
        messages=spoken(raw["messages"]),
        tools=offer.functions,
        tool_choice=offer.choice,
        tool_name=offer.name,
        parallel=wire.parallel_tool_calls is not False and not offer.legacy,
        thinking=wire.enable_thinking,
        effort=wire.reasoning_effort,
        thinking_budget=wire.thinking_token_budget,
        template_arguments=_verbosity(wire, dialect) | (wire.chat_template_kwargs or {}),
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final=bool(wire.continue_final_message),
    )


def _verbosity(wire: ChatRequest, dialect: Dialect) -> dict[str, Any]:
    if wire.verbosity is None or not dialect.unknown_arguments(["verbosity"]):
        return {} if wire.verbosity is None else {"verbosity": wire.verbosity}
    if wire.verbosity != "medium":
        raise Unsupported(
            "'verbosity' is not supported: this model's template knows no such thing. Say in the "
            "messages how long the answer should be.",
            param="verbosity",
        )
    return {}


def _check(message: OpenAIMessage) -> None:
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"A message of role '{message.role}' has no content.", param="messages")
    if message.audio is not None:
        raise Unsupported("Audio in messages is not supported by this server.", param="messages")
    for part in message.content if isinstance(message.content, list) else []:
        if part.type not in ("text", "refusal"):
            raise Unsupported(
                f"Content parts of type '{part.type}' are not supported by this server yet.",
                param="messages",
            )
