"""How likely a model thinks given continuations are: a prompt scored once for each candidate."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from millrace.errors import BadRequest
from millrace.protocol import TokenLogprob
from millrace.rpc.localai import wire
from millrace.serving.batches import PromptCount, check_count
from millrace.serving.dispatch import Origin, run_group
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.text.deltas import PromptScores


async def score(message: Any, model: ServedModel, origin: Origin) -> Any:
    requests, begins = await asyncio.to_thread(_requests, message, model)
    group = await run_group(model, requests, origin)
    found: dict[int, list[TokenLogprob]] = {}
    try:
        async for event in group.events():
            if isinstance(event, PromptScores):
                found[event.first_choice] = event.items
    finally:
        group.close()
    answer = wire.ScoreResponse()
    for number, request in enumerate(requests):
        # The first token of a prompt has no score: item k is token k + 1's.
        own = found.get(number, [])[begins[number] - 1 :]
        assert len(own) == len(request.prompt) - begins[number]
        _fill(answer.candidates.add(), own, message, model)
    return answer


def _fill(scored: Any, items: Sequence[TokenLogprob], message: Any, model: ServedModel) -> None:
    scored.log_prob = sum(item.logprob for item in items)
    scored.num_tokens = len(items)
    if message.length_normalize:
        scored.length_normalized_log_prob = scored.log_prob / len(items)
    if message.include_token_logprobs:
        for item in items:
            text = model.tokenizer.vocabulary.bytes_of(item.token).decode("utf-8", "replace")
            scored.tokens.add(token=text, log_prob=item.logprob)


def _requests(message: Any, model: ServedModel) -> tuple[list[Request], list[int]]:
    """A request per candidate, and where in its prompt the candidate begins."""
    candidates = list(message.candidates)
    if not candidates:
        raise BadRequest("'candidates' is an empty list.", param="candidates")
    check_count(PromptCount(len(candidates), "candidates"))
    if message.stable_prefix_len < 0:
        raise BadRequest("'stable_prefix_len' is negative.", param="stable_prefix_len")
    model.need_text()
    prompt = model.text_prompt(message.prompt)
    if not prompt:
        raise BadRequest("The prompt is empty.", param="prompt")
    boundaries = _boundary(message, model, prompt)
    requests, begins = [], []
    for text, tokens in zip(candidates, model.encode(candidates, special=False), strict=True):
        if not tokens:
            raise BadRequest(f"The candidate {text!r:.50} has no tokens.", param="candidates")
        requests.append(
            Request(
                id=f"localai-{secrets.token_hex(12)}",
                prompt=[*prompt, *tokens],
                only_prompt=True,
                prompt_logprobs=0,
                boundaries=boundaries,
            )
        )
        begins.append(len(prompt))
    return requests, begins


def _boundary(message: Any, model: ServedModel, prompt: list[int]) -> list[int]:
    """How many tokens stay the same over calls, where the text before that place is tokens of its own."""
    length = message.stable_prefix_len
    if not length:
        return []
    text = message.prompt.encode()[:length].decode("utf-8", "ignore")
    stable = model.encode([text], special=True)[0]
    return [len(stable)] if stable and prompt[: len(stable)] == stable else []
