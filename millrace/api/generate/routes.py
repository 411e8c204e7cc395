"""POST and PUT /generate: prompts in, cumulative text and tokens out, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import DONE, KEEP_ALIVE, EventStream, as_json, data, whole
from millrace.api.context import checked_id, request_id
from millrace.api.errors import openai_error
from millrace.api.generate import info, tokens
from millrace.api.generate.answers import GenerateAnswer, GeneratedSoFar
from millrace.api.generate.outputs import Outputs
from millrace.api.generate.request import (
    PromptRequest,
    check,
    count_of,
    prompt_requests,
    read_prompts,
)
from millrace.api.generate.schema import ADVISORY, REFUSED, GenerateRequest
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.prelude import Border, ignored_header, in_words
from millrace.api.running import run_group
from millrace.errors import BadRequest
from millrace.serving.group import Group
from millrace.serving.model import ServedModel
from millrace.text.deltas import Idle

router = APIRouter()
router.include_router(tokens.router)
router.include_router(info.router)
_BORDER = Border(GenerateRequest, REFUSED, ADVISORY, prompts=count_of)


@router.post("/generate")
@router.put("/generate")
@describe(
    "sglang",
    "Continue prompts",
    body=GenerateRequest,
    answer=GenerateAnswer,
    stream=SSE,
    event=GeneratedSoFar,
    statuses=RUNS,
)
async def generate(http: HttpRequest) -> Response:
    asked = await _BORDER.read(http)
    wire, model = asked.wire, asked.model
    # Long texts and lists take a while to read: not on the event loop.
    ignored = await asyncio.to_thread(check, asked.raw)
    with in_words({"messages": "text" if wire.text is not None else "input_ids"}):
        tokens, is_batch, parts = await asyncio.to_thread(read_prompts, wire, model)
        prompts = [
            await model.pictures.placed(own, shown, model.tokenizer)
            for own, shown in zip(tokens, parts, strict=True)
        ]
        ids, headers = _ids(http, wire, len(prompts), is_batch)
        questions = await asyncio.to_thread(prompt_requests, wire, model, prompts, ids)
        batch = await run_group(http, model, [q.request for q in questions])
    answers = _Answers(model, batch, questions, bool(wire.return_text_in_logprobs), is_batch)
    headers |= ignored_header([*asked.ignored, *ignored])
    if wire.stream:
        chunks = answers.chunks()
        return EventStream(chunks, batch.close, lambda e: data(openai_error(e)), headers)
    return as_json(await whole(http, answers.whole(), batch.close), headers)


def _ids(
    http: HttpRequest, wire: GenerateRequest, count: int, is_batch: bool
) -> tuple[list[str], dict[str, str]]:
    """One id per prompt: the client's own, or parts of one id, by which all can be aborted."""
    if isinstance(wire.rid, list):
        if len(wire.rid) != count or len(set(wire.rid)) != count:
            raise BadRequest(
                f"'rid' must be one id, or a different one for each of the {count} prompts.",
                param="rid",
            )
        return [checked_id(http, rid, "rid") for rid in wire.rid], {}
    base = checked_id(http, wire.rid, "rid") if wire.rid else request_id(http, "gen-")
    ids = [f"{base}#{i}" for i in range(count)] if is_batch else [base]
    return ids, {"x-request-id": base}


class _Answers:
    """All answers of a call: one object, or a list where there are several prompts or choices."""

    def __init__(
        self,
        model: ServedModel,
        batch: Group,
        prompt_requests: list[PromptRequest],
        texts: bool,
        is_batch: bool,
    ) -> None:
        self._batch = batch
        self._outputs = [
            Outputs(a, r, model, texts) for a, r in zip(prompt_requests, batch.members, strict=True)
        ]
        self._listed = is_batch or self._outputs[0].n > 1

    async def whole(self) -> Any:
        async for number, event in self._batch.numbered():
            self._outputs[number].see(event)
        reported = await asyncio.to_thread(self._spelled)
        return reported if self._listed else reported[0]

    def _spelled(self) -> list[msgspec.Raw]:
        """All answers as JSON. Logprobs may be millions: each by itself, so that others run in between."""
        return [
            msgspec.Raw(msgspec.json.encode(o.tell(choice)))
            for o in self._outputs
            for choice in range(o.n)
        ]

    async def chunks(self) -> AsyncIterator[bytes]:
        async for number, event in self._batch.numbered():
            if isinstance(event, Idle):
                yield KEEP_ALIVE
            for choice in self._outputs[number].see(event):
                chunk = self._outputs[number].tell(choice)
                if self._listed:
                    chunk["index"] = self._batch.firsts[number] + choice
                yield data(chunk)
        yield DONE
