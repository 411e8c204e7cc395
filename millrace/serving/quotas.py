"""Quotas: what one API key, or one model for all its callers, is held to.

Rates are counted by `RateLimits`. Besides them, a key has a number of answers at a time, and both have a
largest prompt and a largest answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.config import ApiKey, LimitSettings
from millrace.errors import BadRequest, PromptLimitExceeded, RateLimited
from millrace.serving.keys import caller_id
from millrace.serving.limits import OwnLimits, RateLimits


class UsageQuota:
    """The limits of one owner, a key or a model, and how many of its answers are running."""

    def __init__(self, owner: str, rates: RateLimits, own: OwnLimits | None = None) -> None:
        self.owner = owner
        self.rates = rates
        self.limits = own.settings if own is not None else LimitSettings()
        self._table = own.table if own is not None else ""
        self.running = 0

    def check_prompt(self, tokens: int) -> None:
        most = self.limits.max_prompt_tokens
        if most is not None and tokens > most:
            raise PromptLimitExceeded(tokens, most, f"max_prompt_tokens in {self._table}")

    def check_answer(self, tokens: int) -> None:
        """`tokens` is how long the request asks its answer to be at most."""
        most = self.limits.max_answer_tokens
        if most is not None and tokens > most:
            raise BadRequest(
                f"The request asks for up to {tokens} tokens, and an answer may have {most} "
                f"(max_answer_tokens in {self._table}). Ask for at most {most}.",
                param="max_tokens",
            )

    def begin(self, answers: int) -> None:
        """Count answers that are about to run; `end` must follow.

        One request is served by itself, however many answers it asks for.
        """
        most = self.limits.max_running
        if most is not None and self.running and self.running + answers > most:
            raise RateLimited(
                f"{self.running} answers of this key are running, and it may have {most} at a time "
                f"(max_running in {self._table}). Try again when one has ended."
            )
        self.running += answers

    def end(self, answers: int) -> None:
        self.running -= answers

    def charge(self, tokens: int) -> None:
        if self.rates:
            self.rates.charge(self.owner, tokens)


class Quotas:
    """The quotas of all keys, or of all models; those without limits of their own have the rates alone."""

    def __init__(self, rates: RateLimits, own: Mapping[str, OwnLimits] | None = None) -> None:
        self.rates = rates
        self._own = {owner: UsageQuota(owner, rates, one) for owner, one in (own or {}).items()}

    def of(self, owner: str) -> UsageQuota:
        return self._own.get(owner) or UsageQuota(owner, self.rates)


def key_quotas(keys: Sequence[ApiKey], requests: int | None, tokens: int | None) -> Quotas:
    """`requests` and `tokens` are the rates of all keys, or of all addresses where there are none."""
    own = {
        caller_id(key.secret): OwnLimits(key.limits, f"[keys.{key.name}]")
        for key in keys
        if key.limits.given
    }
    return Quotas(RateLimits(requests, tokens, own=own), own)


def model_quotas(models: Mapping[str, LimitSettings]) -> Quotas:
    own = {
        name: OwnLimits(limits, f"[models.{name}]")
        for name, limits in models.items()
        if limits.given
    }
    return Quotas(RateLimits(None, None, own=own), own)
