"""POST /v1/completions: raw prompts, one or a list, as text or as token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, data, whole
from millrace.api.context import request_id
from millrace.api.errors import openai_error
from millrace.api.openai.answers import Completion
from millrace.api.openai.completion_answer import CompletionChunks, CompletionFolding
from millrace.api.openai.envelope import folded, stream_options_of, streamed
from millrace.api.openai.schema import ADVISORY, CompletionRequest, token_limit
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.prelude import Border, in_words
from millrace.api.running import run_group
from millrace.errors import BadRequest, Unsupported
from millrace.serving.batches import PromptCount, is_token, prompts_in
from millrace.serving.forms import demanded
from millrace.serving.model import ServedModel
from millrace.serving.request import Request, check_tokens
from millrace.serving.sampling_fields import fill, sampling_fields

router = APIRouter()


def _count(wire: CompletionRequest) -> PromptCount:
    prompts = prompts_in(wire.prompt)
    return PromptCount(prompts, "prompt", prompts * max(wire.n or 1, wire.best_of or 1))


_BORDER = Border(CompletionRequest, advisory=ADVISORY, prompts=_count)
_HERE = {"messages": "prompt"}
"""What the core calls a prompt, as this endpoint does."""


@router.post("/v1/completions")
@describe(
    "openai",
    "Continue one text or several",
    body=CompletionRequest,
    answer=Completion,
    stream=SSE,
    event=Completion,
    statuses=RUNS,
)
async def completions(http: HttpRequest) -> Response:
    asked = await _BORDER.read(http)
    wire, model = asked.wire, asked.model
    options = stream_options_of(wire)
    id = request_id(http, "cmpl-")
    with in_words(_HERE):
        requests, chunks = await asyncio.to_thread(_read, id, wire, model)
        group = await run_group(http, model, requests)
    headers = asked.headers(id)
    if wire.stream:
        stream = streamed(group, chunks, options)
        return EventStream(stream, group.close, lambda e: data(openai_error(e)), headers)
    answer = folded(group.events(), group.n, chunks, CompletionFolding(chunks, wire))
    return as_json(await whole(http, answer, group.close), headers)


def _read(
    id: str, wire: CompletionRequest, model: ServedModel
) -> tuple[list[Request], CompletionChunks]:
    """A request for each prompt, and what their answers become. Tokenises: not for the event loop."""
    prompts = prompts_of(wire.prompt, model)
    if wire.suffix:
        prompts = _around(prompts, wire, model)
    requests = [
        _request(id if len(prompts) == 1 else f"{id}#{i}", prompt, wire, model)
        for i, prompt in enumerate(prompts)
    ]
    return requests, CompletionChunks(id, model, wire, prompts)


def _around(
    prompts: list[list[int]], wire: CompletionRequest, model: ServedModel
) -> list[list[int]]:
    """Prompts for what stands between each of them and the suffix."""
    if model.infill is None:
        raise Unsupported(
            "'suffix' is not supported by this model: its vocabulary has no tokens to fill in the "
            "middle.",
            param="suffix",
        )
    if wire.echo:
        raise BadRequest("'echo' and 'suffix' cannot go together.", param="echo")
    return [model.infill.prompt(p, wire.suffix or "") for p in prompts]


def _request(id: str, prompt: list[int], wire: CompletionRequest, model: ServedModel) -> Request:
    fields = sampling_fields(wire)
    fields.max_tokens = token_limit(wire)
    request = fill(Request(id=id, prompt=prompt), fields, model)
    if request.max_tokens == 0:
        if not wire.echo:
            raise BadRequest(
                "max_tokens: 0 makes nothing; it is for scoring a prompt, with echo: true.",
                param="max_tokens",
            )
        request.only_prompt = True
    if wire.suffix and model.infill is not None:
        request.end_token_ids = model.infill.ends
    request.grammar = model.form(demanded(wire))
    request.logprobs = wire.logprobs
    request.prompt_logprobs = wire.prompt_logprobs
    if wire.echo and wire.logprobs is not None and request.prompt_logprobs is None:
        request.prompt_logprobs = wire.logprobs
    best_of = wire.best_of or request.n
    if best_of < request.n:
        raise BadRequest("best_of must be at least n.", param="best_of")
    if best_of > request.n:
        if wire.stream:
            raise BadRequest("best_of greater than n cannot be streamed.", param="best_of")
        request.n = best_of
        request.logprobs = wire.logprobs or 0
    return request


def prompts_of(prompt: str | list[Any], model: ServedModel) -> list[list[int]]:
    """A string, a list of strings, a list of token ids, or a list of those."""
    if isinstance(prompt, str):
        return [model.text_prompt(prompt)]
    if not prompt:
        raise BadRequest("The prompt is an empty list.", param="prompt")
    if all(isinstance(p, str) for p in prompt):
        return model.text_prompts(prompt)
    if all(is_token(p) for p in prompt):
        check_tokens("prompt", prompt, model.width)
        return [prompt]
    if all(isinstance(p, list) and p and all(map(is_token, p)) for p in prompt):
        for ids in prompt:
            check_tokens("prompt", ids, model.width)
        return prompt
    raise BadRequest(
        "The prompt must be a string, a list of strings, a list of token ids, or a list of lists "
        "of token ids.",
        param="prompt",
    )
