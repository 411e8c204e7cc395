"""POST /v1/completions: raw prompts, one or a list, as text or as token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import DONE, KEEP_ALIVE, EventStream, as_json, data, whole
from millrace.api.body import convert, read_object, refuse, unknown
from millrace.api.context import context_of, fresh_id
from millrace.api.errors import openai_error
from millrace.api.openai.common import ignored_header, sampling_of, seed_of, usage_of
from millrace.api.openai.schema import REFUSED_BY_COMPLETIONS, CompletionRequest, known
from millrace.errors import BadRequest
from millrace.serving.fold import Answer, fold
from millrace.serving.group import Group
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.text.deltas import Content, Delta, Event, Finish, Idle, Usage

router = APIRouter()
_KNOWN = known(CompletionRequest, REFUSED_BY_COMPLETIONS)


@router.post("/v1/completions")
async def completions(http: HttpRequest) -> Response:
    context = context_of(http)
    raw = await read_object(http, context.config.max_body)
    wire = convert(raw, CompletionRequest)
    refuse(raw, REFUSED_BY_COMPLETIONS)
    model = context.registry.get(wire.model)
    id = fresh_id("cmpl-")
    prompts = prompts_of(wire.prompt, model)
    requests = [
        Request(
            id=id if len(prompts) == 1 else f"{id}-{i}",
            prompt=prompt,
            sampling=sampling_of(wire, model),
            seed=seed_of(wire),
            n=wire.n or 1,
            max_tokens=wire.max_tokens,
            stop_token_ids=wire.stop_token_ids or [],
            skip_special_tokens=wire.skip_special_tokens,
        )
        for i, prompt in enumerate(prompts)
    ]
    headers = {"x-request-id": id} | ignored_header(unknown(raw, _KNOWN))
    group = Group(model, requests)
    envelope = _Envelope(id, model)
    if wire.stream:
        usage = wire.stream_options is not None and wire.stream_options.include_usage
        chunks = envelope.chunks(group, usage)
        return EventStream(chunks, group.close, lambda e: data(openai_error(e)), headers)
    answers, usage_ = await whole(http, fold(group.events(), group.n), group.close)
    return as_json(envelope.whole(answers, usage_), headers)


def prompts_of(prompt: str | list[Any], model: ServedModel) -> list[list[int]]:
    """A string, a list of strings, a list of token ids, or a list of those."""
    if isinstance(prompt, str):
        return [model.text_prompt(prompt)]
    if not prompt:
        raise BadRequest("The prompt is an empty list.", param="prompt")
    if all(isinstance(p, str) for p in prompt):
        return [model.text_prompt(p) for p in prompt]
    if all(_is_token(p) for p in prompt):
        return [_checked(prompt, model)]
    if all(isinstance(p, list) and p and all(map(_is_token, p)) for p in prompt):
        return [_checked(p, model) for p in prompt]
    raise BadRequest(
        "The prompt must be a string, a list of strings, a list of token ids, or a list of lists "
        "of token ids.",
        param="prompt",
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(ids: list[int], model: ServedModel) -> list[int]:
    size = len(model.tokenizer.vocabulary)
    for id in ids:
        if not 0 <= id < size:
            raise BadRequest(
                f"Token id {id} is not in the vocabulary of {size} tokens.", param="prompt"
            )
    return ids


class _Envelope:
    """The wire objects of one completion."""

    def __init__(self, id: str, model: ServedModel) -> None:
        self._head = {
            "id": id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        choices = [
            _choice(i, a.content, a.finish.reason if a.finish else None, _matched(a.finish))
            for i, a in enumerate(answers)
        ]
        return self._head | {"choices": choices, "usage": usage_of(usage)}

    async def chunks(self, group: Group, include_usage: bool) -> AsyncIterator[bytes]:
        async for event in group.events():
            if out := self._translate(event, include_usage):
                yield out
        yield DONE

    def _translate(self, event: Event, include_usage: bool) -> bytes | None:
        match event:
            case Delta(choice=choice, piece=Content(text=text)):
                return data(self._head | {"choices": [_choice(choice, text)]})
            case Delta(choice=choice, piece=Finish() as finish):
                last = _choice(choice, "", finish.reason, finish.matched)
                return data(self._head | {"choices": [last]})
            case Usage() if include_usage:
                return data(self._head | {"choices": [], "usage": usage_of(event)})
            case Idle():
                return KEEP_ALIVE
        return None


def _matched(finish: Finish | None) -> str | int | None:
    return finish.matched if finish else None


def _choice(
    index: int, text: str, reason: str | None = None, matched: str | int | None = None
) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
    }
    return value | ({} if reason is None else {"matched_stop": matched})
