"""How a request tells the model to think, and what its template arguments come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from millrace.errors import BadRequest
from millrace.serving.ranges import Count
from millrace.text.dialect import Dialect


class ThinkingWish(msgspec.Struct):
    """Whether the model is to think, as several hosted models' own APIs have it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


_IN_TEMPLATES = ("enable_thinking", "thinking")
"""What templates call their switch."""


class ThinkingFields(Protocol):
    """How the model is told to think, in the words of every server that has a way to say it."""

    enable_thinking: bool | None
    thinking: ThinkingWish | None
    thinking_token_budget: int | None
    chat_template_kwargs: dict[str, Any] | None


class WantedThinking(NamedTuple):
    wanted: bool | None
    budget: int | None


def thinking_of(wire: ThinkingFields) -> WantedThinking:
    """What the fields say together."""
    asked: dict[str, bool] = {}
    if wire.enable_thinking is not None:
        asked["enable_thinking"] = wire.enable_thinking
    if wire.thinking is not None:
        asked["thinking"] = wire.thinking.type != "disabled"
    if (switch := template_switch(wire.chat_template_kwargs or {})) is not None:
        asked["chat_template_kwargs"] = switch
    if len(set(asked.values())) > 1:
        names = " and ".join(f"'{name}'" for name in asked)
        raise BadRequest(f"{names} contradict each other.", param=next(iter(asked)))
    budgets = {wire.thinking_token_budget, wire.thinking.budget_tokens if wire.thinking else None}
    budgets.discard(None)
    if len(budgets) > 1:
        raise BadRequest(
            "'thinking.budget_tokens' and 'thinking_token_budget' contradict each other.",
            param="thinking.budget_tokens",
        )
    return WantedThinking(next(iter(asked.values()), None), next(iter(budgets), None))


def template_switch(arguments: Mapping[str, Any]) -> bool | None:
    """What template arguments say of thinking, under either of the names that templates have."""
    found = {v for n in _IN_TEMPLATES if isinstance(v := arguments.get(n), bool)}
    if len(found) > 1:
        raise BadRequest(
            "'enable_thinking' and 'thinking' contradict each other.", param="chat_template_kwargs"
        )
    return next(iter(found), None)


def strange_arguments(arguments: Mapping[str, Any], dialect: Dialect) -> list[str]:
    """Template arguments without an effect: those that neither the template nor we read."""
    switches = {n for n in _IN_TEMPLATES if isinstance(arguments.get(n), bool)}
    unread = dialect.unknown_arguments(n for n in arguments if n not in switches)
    return [f"chat_template_kwargs.{name}" for name in unread]
