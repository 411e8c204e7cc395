"""POST /v1/completions: raw prompts, one or a list, as text or as token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import DONE, KEEP_ALIVE, EventStream, as_json, data, whole
from millrace.api.body import convert, read_object, refuse, unknown
from millrace.api.context import context_of, request_id
from millrace.api.errors import openai_error
from millrace.api.openai.answers import Completion
from millrace.api.openai.common import (
    CompletionLogprobs,
    demanded,
    fill,
    joined,
    token_name,
    usage_of,
    wants_usage,
)
from millrace.api.openai.schema import REFUSED_BY_COMPLETIONS, CompletionRequest, known
from millrace.api.openapi.describe import RUNS, SSE, describe
from millrace.api.running import run_group
from millrace.api.sampling import ignored_header
from millrace.errors import BadRequest, Unsupported
from millrace.protocol import TokenLogprob
from millrace.serving.fold import Answer, fold
from millrace.serving.group import Group
from millrace.serving.model import ServedModel
from millrace.serving.request import Request, check_tokens
from millrace.text.deltas import Content, Delta, Event, Finish, Idle, PromptScores, Usage

router = APIRouter()
MOST_ANSWERS = 2048
_KNOWN = known(CompletionRequest, REFUSED_BY_COMPLETIONS)


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
    context = context_of(http)
    raw = await read_object(http, context.config.max_body)
    wire = convert(raw, CompletionRequest)
    refuse(raw, REFUSED_BY_COMPLETIONS)
    model = context.registry.get(wire.model)
    id = request_id(http, "cmpl-")
    prompts, requests = await asyncio.to_thread(_requests, id, wire, model)
    headers = {"x-request-id": id} | ignored_header(unknown(raw, _KNOWN))
    group = run_group(http, model, requests)
    envelope = _Envelope(id, model, wire, prompts)
    if wire.stream:
        chunks = envelope.chunks(group, wants_usage(wire))
        return EventStream(chunks, group.close, lambda e: data(openai_error(e)), headers)
    answers, usage = await whole(http, fold(group.events(), group.n), group.close)
    return as_json(envelope.whole(answers, usage), headers)


def _requests(
    id: str, wire: CompletionRequest, model: ServedModel
) -> tuple[list[list[int]], list[Request]]:
    """The prompts, and a request for each. Tokenises: not for the event loop."""
    several = isinstance(wire.prompt, list) and not any(map(_is_token, wire.prompt[:1]))
    answers = max(wire.n or 1, wire.best_of or 1) * (len(wire.prompt) if several else 1)
    if answers > MOST_ANSWERS:
        raise BadRequest(
            f"The request asks for {answers} answers; the most in one request are {MOST_ANSWERS}.",
            param="prompt",
        )
    prompts = prompts_of(wire.prompt, model)
    if wire.suffix:
        prompts = _around(prompts, wire, model)
    requests = [
        _request(id if len(prompts) == 1 else f"{id}#{i}", prompt, wire, model)
        for i, prompt in enumerate(prompts)
    ]
    return prompts, requests


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
    request = Request(id=id, prompt=prompt)
    fill(request, wire, model)
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
    if all(_is_token(p) for p in prompt):
        check_tokens("prompt", prompt, model.width)
        return [prompt]
    if all(isinstance(p, list) and p and all(map(_is_token, p)) for p in prompt):
        for ids in prompt:
            check_tokens("prompt", ids, model.width)
        return prompt
    raise BadRequest(
        "The prompt must be a string, a list of strings, a list of token ids, or a list of lists "
        "of token ids.",
        param="prompt",
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Envelope:
    """The wire objects of one completion, its choices over all prompts numbered through."""

    def __init__(
        self, id: str, model: ServedModel, wire: CompletionRequest, prompts: list[list[int]]
    ) -> None:
        self._head = {
            "id": id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._vocabulary = model.tokenizer.vocabulary
        self._prompts = prompts
        self._texts = [model.tokenizer.decode(p) for p in prompts] if wire.echo else []
        self._n = wire.n or 1
        self._generated = max(self._n, wire.best_of or 1)
        """Choices generated per prompt; the best n are told."""
        self._wants_logprobs = wire.logprobs is not None
        self._wants_prompt = wire.prompt_logprobs is not None
        self._scorers: dict[int, CompletionLogprobs] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        """Scores of each prompt."""

    def whole(self, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for number in range(len(self._prompts)):
            generated = answers[number * self._generated : (number + 1) * self._generated]
            self._scores[number] = generated[0].prompt
            if self._generated > self._n:
                generated = sorted(generated, key=_mean_logprob, reverse=True)[: self._n]
            choices += [
                self._whole_choice(len(choices) + k, number, a) for k, a in enumerate(generated)
            ]
        return self._head | {"choices": choices, "usage": usage_of(usage)}

    def _whole_choice(self, index: int, number: int, answer: Answer) -> dict[str, Any]:
        parts = self._prompt_part(index, number)
        if self._wants_logprobs:
            parts.append(self._scorer(index).add(answer.logprobs))
        text = (self._texts[number] if self._texts else "") + answer.content
        choice = _choice(index, text, joined(parts) if parts else None, answer.finish)
        return choice | self._prompt_scores(number)

    async def chunks(self, group: Group, include_usage: bool) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async for event in group.events():
            if isinstance(event, Delta) and event.choice not in begun:
                begun.add(event.choice)
                if first := self._opening(event.choice):
                    yield first
            if out := self._translate(event, include_usage):
                yield out
        yield DONE

    def _opening(self, choice: int) -> bytes | None:
        """What an echo puts before the first piece."""
        number = choice // self._n
        if not self._texts and not self._scores.get(number):
            return None
        parts = self._prompt_part(choice, number)
        body = _choice(
            choice, self._texts[number] if self._texts else "", joined(parts) if parts else None
        )
        return data(self._head | {"choices": [body | self._prompt_scores(number)]})

    def _translate(self, event: Event, include_usage: bool) -> bytes | None:
        match event:
            case Delta(choice=choice, piece=Content(text=text), logprobs=items):
                return self._chunk(choice, text, items, None)
            case Delta(choice=choice, piece=Finish() as finish, logprobs=items):
                return self._chunk(choice, "", items, finish)
            case PromptScores(first_choice=first, items=items):
                self._scores[first // self._n] = items
            case Usage() if include_usage:
                return data(self._head | {"choices": [], "usage": usage_of(event)})
            case Idle():
                return KEEP_ALIVE
        return None

    def _chunk(
        self, choice: int, text: str, items: list[TokenLogprob], finish: Finish | None
    ) -> bytes:
        scores = self._scorer(choice).add(items) if self._wants_logprobs and items else None
        return data(self._head | {"choices": [_choice(choice, text, scores, finish)]})

    def _scorer(self, choice: int) -> CompletionLogprobs:
        if choice not in self._scorers:
            self._scorers[choice] = CompletionLogprobs(self._vocabulary)
        return self._scorers[choice]

    def _prompt_part(self, choice: int, number: int) -> list[dict[str, Any]]:
        """The logprobs of an echoed prompt."""
        if not (self._texts and self._wants_logprobs):
            return []
        scorer = self._scorer(choice)
        scores = self._scores.get(number, [])
        return [scorer.first(self._prompts[number][0]), scorer.add(scores)]

    def _prompt_scores(self, number: int) -> dict[str, Any]:
        if not self._wants_prompt:
            return {}
        listed: list[Any] = [None]
        for item in self._scores.get(number, []):
            ranked = [(item.token, item.logprob), *(p for p in item.top if p[0] != item.token)]
            listed.append(
                {
                    str(t): {"logprob": v, "decoded_token": token_name(self._vocabulary, t)}
                    for t, v in ranked
                }
            )
        return {"prompt_logprobs": listed}


def _mean_logprob(answer: Answer) -> float:
    scores = [i.logprob for i in answer.logprobs]
    return sum(scores) / len(scores) if scores else float("-inf")


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish: Finish | None = None
) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish.reason if finish else None,
    }
    return value | ({"matched_stop": finish.matched} if finish else {})
