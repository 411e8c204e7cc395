"""Tokenize and detokenize, for SGLang's clients and for vLLM's, with and without the /v1 prefix."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.body import convert
from millrace.api.openai.schema import OpenAIMessage, check_end
from millrace.api.openapi.describe import READS, describe
from millrace.api.prelude import Border, ignored_header
from millrace.errors import BadRequest
from millrace.serving.batches import PromptCount, prompts_in
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.ranges import Labels, TokenId
from millrace.serving.request import check_tokens
from millrace.text.conversation import Conversation, turn_of

router = APIRouter()


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    """Rendered by the model's chat template."""
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """True if left out, unless the last message is continued."""
    continue_final_message: bool | None = None
    chat_template_kwargs: Labels | None = None
    add_special_tokens: bool | None = None
    """For a prompt the default is true; a chat template brings its own, so for messages false."""
    return_token_strs: bool | None = None


class _Messages(msgspec.Struct):
    """They are passed on as they came, but must be what chat takes."""

    messages: list[OpenAIMessage]


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = True


_REFUSED: dict[str, tuple[Any, ...]] = {
    "chat_template": ("",),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
_TOKENIZING = Border(
    TokenizeRequest,
    _REFUSED,
    answers=False,
    loads=False,
    prompts=lambda wire: PromptCount(prompts_in(wire.prompt), "prompt"),
)
_DETOKENIZING = Border(
    DetokenizeRequest,
    answers=False,
    loads=False,
    prompts=lambda wire: PromptCount(prompts_in(wire.tokens), "tokens"),
)


@router.post("/v1/tokenize")
@router.post("/tokenize")
@describe("sglang", "Texts or messages to tokens", body=TokenizeRequest, statuses=(404, *READS))
async def tokenize(http: HttpRequest) -> Response:
    asked = await _TOKENIZING.read(http)
    wire, model = asked.wire, asked.model
    if (wire.prompt is None) == (wire.messages is None):
        raise BadRequest("Give exactly one of 'prompt' and 'messages'.", param="prompt")
    if wire.messages is not None:
        special = bool(wire.add_special_tokens)
        written = await prepared(
            model.pictures,
            lambda: _conversation(wire),
            lambda chat: model.render(chat, special=special),
        )
        found = [written.tokens]
    else:
        found = await asyncio.to_thread(_tokens, wire, model)
    several = isinstance(wire.prompt, list)
    body: dict[str, Any] = {
        "tokens": found if several else found[0],
        "count": [len(t) for t in found] if several else len(found[0]),
        "max_model_len": model.window,
    }
    if wire.return_token_strs:
        named = await asyncio.to_thread(
            lambda: [[_text(model, t) for t in tokens] for tokens in found]
        )
        body["token_strs"] = named if several else named[0]
    return as_json(body, ignored_header(asked.ignored))


def _tokens(wire: TokenizeRequest, model: ServedModel) -> list[list[int]]:
    texts = [wire.prompt] if isinstance(wire.prompt, str) else wire.prompt or []
    return model.encode(texts, special=wire.add_special_tokens is not False)


def _conversation(wire: TokenizeRequest) -> Conversation:
    if not wire.messages:
        raise BadRequest("'messages' is an empty list.", param="messages")
    check_end(wire.add_generation_prompt, wire.continue_final_message)
    convert({"messages": wire.messages}, _Messages)
    return Conversation(
        messages=[turn_of(m, f"messages[{at}]") for at, m in enumerate(wire.messages)],
        tools=wire.tools or [],
        template_arguments=wire.chat_template_kwargs or {},
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final=bool(wire.continue_final_message),
    )


def _text(model: ServedModel, token: int) -> str:
    return model.tokenizer.vocabulary.bytes_of(token).decode("utf-8", "replace")


@router.post("/v1/detokenize")
@router.post("/detokenize")
@describe("sglang", "Tokens to texts", body=DetokenizeRequest, statuses=(404, *READS))
async def detokenize(http: HttpRequest) -> Response:
    asked = await _DETOKENIZING.read(http)
    wire, model = asked.wire, asked.model
    text = await asyncio.to_thread(_texts, wire, model)
    # SGLang's clients read `text`, vLLM's `prompt`.
    return as_json({"text": text, "prompt": text}, ignored_header(asked.ignored))


def _texts(wire: DetokenizeRequest, model: ServedModel) -> str | list[str]:
    one = [t for t in wire.tokens if isinstance(t, int)]
    lists = [t for t in wire.tokens if isinstance(t, list)]
    if one and lists:
        raise BadRequest(
            "'tokens' must be a list of token ids, or a list of such lists.", param="tokens"
        )
    for tokens in lists or [one]:
        check_tokens("tokens", tokens, model.width)
    skip = wire.skip_special_tokens
    texts = [model.tokenizer.decode(tokens, skip_special=skip) for tokens in lists or [one]]
    return texts if lists else texts[0]
