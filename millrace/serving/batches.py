"""How many prompts one request may bring: one bound for every endpoint and every transport."""

from __future__ import annotations

from typing import Any, NamedTuple

from millrace.errors import BadRequest

MOST_PROMPTS = 2048
"""Prompts of one request, and answers that it may ask for: OpenAI's own bound on a list of inputs."""


class PromptCount(NamedTuple):
    prompts: int
    param: str
    """The field that they came in."""
    answers: int = 0
    """Where several answers per prompt may be asked for: how many that makes for all prompts."""


def check_count(count: PromptCount) -> None:
    """Raise that a request brings more prompts, or asks for more answers, than one may."""
    if count.prompts > MOST_PROMPTS:
        raise BadRequest(
            f"'{count.param}' has {count.prompts} items; one request may have at most "
            f"{MOST_PROMPTS}. Send several requests.",
            param=count.param,
        )
    if count.answers > MOST_PROMPTS:
        raise BadRequest(
            f"The request asks for {count.answers} answers; one request may ask for at most "
            f"{MOST_PROMPTS}.",
            param=count.param,
        )


def prompts_in(given: str | list[Any] | None) -> int:
    """How many prompts a field holds: a text or a list of token ids is one, any other list its length."""
    if not isinstance(given, list) or not given or is_token(given[0]):
        return 1
    return len(given)


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
