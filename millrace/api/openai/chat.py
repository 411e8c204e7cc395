"""POST /v1/chat/completions: the wire request made into a Request, and its answer sent."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, data, whole
from millrace.api.context import request_id
from millrace.api.errors import openai_error
from millrace.api.openai.answers import ChatChunk, ChatCompletion
from millrace.api.openai.chat_answer import ChatChunks, ChatFolding
from millrace.api.openai.envelope import folded, stream_options_of, streamed
from millrace.api.openai.schema import (
    ADVISORY,
    REFUSED_BY_CHAT,
    ChatRequest,
    OpenAIMessage,
    check_end,
    token_limit,
)
from millrace.api.openai.tools import Offer, offer_of, spoken
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.prelude import Border
from millrace.api.running import run
from millrace.errors import BadRequest, Unsupported
from millrace.serving.forms import demanded
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.sampling_fields import fill, sampling_fields
from millrace.serving.thinking import strange_arguments, thinking_of
from millrace.text.conversation import Conversation, turn_of
from millrace.text.dialect import Dialect

router = APIRouter()
_BORDER = Border(ChatRequest, REFUSED_BY_CHAT, ADVISORY)
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
    asked = await _BORDER.read(http)
    wire, model = asked.wire, asked.model
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    options = stream_options_of(wire)
    id = request_id(http, "chatcmpl-")
    offer = offer_of(wire)
    request, ignored = await prepared(
        model.pictures,
        lambda: conversation_of(asked.raw, wire, offer, model.dialect),
        lambda chat: _request(id, chat, wire, offer, model),
    )
    headers = asked.headers(id, ignored)
    running = run(http, model, request)
    chunks = ChatChunks(id, model, bool(wire.logprobs), offer)
    if wire.stream:
        stream = streamed(running, chunks, options)
        return EventStream(stream, running.close, lambda e: data(openai_error(e)), headers)
    answer = folded(running.events(), running.n, chunks, ChatFolding(bool(wire.logprobs)))
    return as_json(await whole(http, answer, running.close), headers)


def _request(
    id: str, chat: Conversation, wire: ChatRequest, offer: Offer, model: ServedModel
) -> tuple[Request, list[str]]:
    """The request, and the names of what was left out of it."""
    request = model.chat(id, chat, demanded(wire))
    fields = sampling_fields(wire)
    fields.max_tokens = token_limit(wire)
    fill(request, fields, model)
    request.logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    ignored = [*offer.ignored, *(_HERE[name] for name in model.dialect.ignored(chat))]
    if wire.web_search_options is not None:
        ignored.append("web_search_options")
    return request, ignored + strange_arguments(wire.chat_template_kwargs or {}, model.dialect)


def conversation_of(
    raw: dict[str, Any], wire: ChatRequest, offer: Offer, dialect: Dialect
) -> Conversation:
    check_end(wire.add_generation_prompt, wire.continue_final_message)
    for message in wire.messages:
        _check(message)
    thinking = thinking_of(wire)
    return Conversation(
        messages=[turn_of(m, f"messages[{at}]") for at, m in enumerate(spoken(raw["messages"]))],
        tools=offer.functions,
        tool_choice=offer.choice,
        tool_name=offer.name,
        parallel=wire.parallel_tool_calls is not False and not offer.legacy,
        thinking=thinking.wanted,
        effort=wire.reasoning_effort,
        thinking_budget=thinking.budget,
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
        if part.type not in ("text", "refusal", "image_url", "video_url"):
            raise Unsupported(
                f"Content parts of type '{part.type}' are not supported by this server; it takes "
                "text and pictures.",
                param="messages",
            )
