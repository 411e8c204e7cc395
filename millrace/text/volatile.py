"""Lines of system prompts that change from one request to the next: a date, a counter of tokens.

One such line near the top makes every prompt a new one. Where the operator asks for it, they are
taken out before the prompt is rendered. Only whole lines go, and only from system messages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millrace.errors import SetupError

log = logging.getLogger("millrace.text")

AUTO = "auto"
"""Stands for the patterns below."""

_LONGEST = 200
"""Characters of a line that the patterns below are tried on: what they look for is short."""
_LEAD = r"[\s>*#_`-]*(?:<[\w-]+>\s*)?"
_TAIL = r"\s*(?:</[\w-]+>)?[\s*_`.]*"
_IS = r"[*_`]*\s*(?:is|:|=)[*_`]*\s*"
_MONTH = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_DAY = (
    r"mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:rs(?:day)?)?|fri(?:day)?|sat(?:urday)?"
    r"|sun(?:day)?"
)
_ZONE = r"(?-i:[A-Z]{2,5}|Z)|[a-z]+/[a-z_]+"
_WHEN = (
    rf"(?=.*\d)(?:\d(?:st|nd|rd|th)?|[\s,.:/()+-]|(?-i:(?<=\d)[TZ])|[ap]\.m\."
    rf"|\b(?:[ap]m|at|the|of|and|{_MONTH}|{_DAY}|{_ZONE})\b)++"
)
_CLOCK = (
    r"(?:the\s+)?(?:(?:current|present|local|server)\s+){0,2}"
    r"(?:today(?:['’]s)?(?:\s+date)?|now"
    r"|(?:date|time|datetime|timestamp)(?:\s*(?:and|&|/)\s*(?:date|time))?)(?:\s*\([^)]*\))?"
)
_COUNT = r"~?\d[\d.,]*\s*[km%]?"
_WHAT = r"(?:\s*(?:tokens?|used|left|remaining))*"
_COUNTER = (
    r"(?:(?:total|current|context)\s+)?(?:tokens?(?:\s+(?:usage|count|budget))?"
    r"|context(?:\s+window)?)(?:\s+(?:used|left|remaining|so\s+far|usage))*"
)

PATTERNS = (
    rf"(?i:{_LEAD}{_CLOCK}{_IS}{_WHEN}{_TAIL})",
    rf"(?i:{_LEAD}{_COUNTER}{_IS}{_COUNT}(?:\s*(?:/|of|out\s+of)\s*{_COUNT})?{_WHAT}"
    rf"(?:\s*[,;(]\s*{_COUNT}{_WHAT}\s*\)?)?{_TAIL})",
)
"""Lines that hold a date, a time or a count of tokens, and nothing else."""


class Volatile:
    """The lines to take out, by pattern: one anywhere in a line marks it; `auto` is ours."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._whole: list[re.Pattern[str]] = []
        self._within: list[re.Pattern[str]] = []
        self._reported = False
        for pattern in patterns:
            if pattern == AUTO:
                self._whole += map(re.compile, PATTERNS)
                continue
            try:
                self._within.append(re.compile(pattern))
            except re.error as error:
                raise SetupError(
                    f"--strip-volatile {pattern} is not a regular expression: {error}."
                ) from error

    def __bool__(self) -> bool:
        return bool(self._whole or self._within)

    def strip(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], int]:
        """The messages without such lines, and how many there were."""
        if not self:
            return messages, 0
        found: list[Mapping[str, Any]] = []
        lines = 0
        for message in messages:
            if message.get("role") in ("system", "developer"):
                content, count = self._content(message.get("content"))
                message = {**message, "content": content} if count else message
                lines += count
            found.append(message)
        if lines and not self._reported:
            self._reported = True
            log.info("volatile lines are taken out of system prompts: %d of the first", lines)
        return found, lines

    def _content(self, content: Any) -> tuple[Any, int]:
        if isinstance(content, str):
            return self._text(content)
        if not isinstance(content, list):
            return content, 0
        parts: list[Any] = []
        lines = 0
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                text, count = self._text(part["text"])
                part = {**part, "text": text} if count else part
                lines += count
            parts.append(part)
        return parts, lines

    def _text(self, text: str) -> tuple[str, int]:
        lines = text.split("\n")
        kept = [line for line in lines if not self._matches(line)]
        return "\n".join(kept), len(lines) - len(kept)

    def _matches(self, line: str) -> bool:
        plain = " ".join(line.split()) if len(line) <= _LONGEST else ""
        if any(p.fullmatch(plain) for p in self._whole):
            return True
        return any(p.search(line) for p in self._within)
