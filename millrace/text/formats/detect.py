"""Which family a model belongs to, read from its chat template and its vocabulary.

Owns the names users give to override the guess, and what a template's own variables say about
switching its reasoning on, off or up.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

from millrace.errors import SetupError
from millrace.text.formats.families import FAMILIES, PLAIN
from millrace.text.formats.syntax import OutputFormat, ThoughtSyntax
from millrace.text.formats.thoughts import THOUGHTS, detect_thought


def detect(template: str, tokens: Set[str] = frozenset()) -> OutputFormat:
    """The format of a model's answers. `tokens` are the texts of its special and added tokens."""
    found = _family(template, tokens)
    if found.messages is None:
        own = found.thought if _thinks(found.thought, template, tokens) else None
        found = found.with_thought(own or detect_thought(template, tokens))
    return found.with_drops(_unclaimed(found, tokens))


def _family(template: str, tokens: Set[str]) -> OutputFormat:
    for family in FAMILIES:
        if any(all(sign in template for sign in group) for group in family.signs):
            return family.format
    for family in FAMILIES:
        if any(token in tokens for token in family.tokens):
            return family.format
    return PLAIN


def _thinks(thought: ThoughtSyntax | None, template: str, tokens: Set[str]) -> bool:
    if thought is None:
        return False
    if any(mark in template or mark in tokens for mark in (*thought.opens, *thought.closes)):
        return True
    return thought.name in ("kimi-k3", "hunyuan")


def _unclaimed(format: OutputFormat, tokens: Set[str]) -> frozenset[str]:
    """Special tokens that mean nothing to the format: they are dropped wherever they appear."""
    return frozenset(token for token in tokens if token.strip() and token not in format.markers)


def by_name(name: str) -> OutputFormat:
    """The format a user asked for by name."""
    for family in FAMILIES:
        if family.format.name == name:
            return family.format
    if name == PLAIN.name:
        return PLAIN
    raise SetupError(f"There is no tool format '{name}'. Choose one of: {', '.join(names())}.")


def names() -> list[str]:
    return [*(family.format.name for family in FAMILIES), PLAIN.name]


def thought_by_name(name: str) -> ThoughtSyntax | None:
    """The reasoning format a user asked for by name; `none` for none."""
    if name == "none":
        return None
    for thought in THOUGHTS:
        if thought.name == name:
            return thought
    known = ", ".join(thought_names())
    raise SetupError(f"There is no reasoning format '{name}'. Choose one of: {known}.")


def thought_names() -> list[str]:
    return [*(thought.name for thought in THOUGHTS), "none"]


def choose(
    template: str,
    tokens: Set[str] = frozenset(),
    tool_format: str | None = None,
    reasoning_format: str | None = None,
) -> OutputFormat:
    """The detected format, with either half replaced by the one a user named."""
    found = detect(template, tokens)
    if tool_format is not None:
        named = by_name(tool_format)
        found = named.with_thought(named.thought or found.thought)
        found = found.with_drops(_unclaimed(found, tokens))
    if reasoning_format is not None:
        found = found.with_thought(thought_by_name(reasoning_format))
    return found


@dataclass(frozen=True)
class ThinkingControls:
    """The template variables that steer reasoning; None where the template has no such thing."""

    switch: str | None = None
    effort: str | None = None
    budget: str | None = None
    off_word: str | None = None
    """A word in the system message that switches reasoning off, where no variable does."""

    def arguments(
        self, enabled: bool | None = None, effort: str | None = None, budget: int | None = None
    ) -> dict[str, object]:
        """The template arguments for what a request asks."""
        found: dict[str, object] = {}
        if effort is not None and self.effort is not None:
            found[self.effort] = effort
        if budget is not None and self.budget is not None:
            found[self.budget] = budget
        if enabled is None:
            return found
        if self.switch == "thinking_mode":
            found[self.switch] = "enabled" if enabled else "disabled"
        elif self.switch is not None:
            found[self.switch] = enabled
        elif self.budget is not None and not enabled:
            found[self.budget] = 0
        elif self.effort is not None and not enabled:
            found[self.effort] = "none"
        return found


_SWITCHES = ("enable_thinking", "thinking_mode", "thinking")
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")


def thinking_controls(template: str) -> ThinkingControls:
    def used(name: str) -> bool:
        return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", template) is not None

    return ThinkingControls(
        switch=next((name for name in _SWITCHES if used(name)), None),
        effort=next((name for name in _EFFORTS if used(name)), None),
        budget="thinking_budget" if used("thinking_budget") else None,
        off_word="/no_think" if "/no_think" in template else None,
    )
