"""A lower bound on the tokens of stored items, known without decoding or rendering them.

Counts what is in every prompt of a template that writes all turns: those of users, instructions and tools
that are not blank, and their printable ASCII. What an assistant said is not counted, since templates may
drop thoughts from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.errors import ContextLengthExceeded
from millrace.serving.model import ServedModel

_COUNTED = ("user", "system", "developer")
_BLANKS = b" \t\n\r\x0b\x0c"
_SHORT_TOKEN = 16
"""Every vocabulary has longer tokens than this, so less text than that for each is not looked at."""


@dataclass(frozen=True)
class StoredMeasure:
    turns: int = 0
    text: int = 0
    """Characters of ASCII that are not blank."""

    def plus(self, other: StoredMeasure) -> StoredMeasure:
        return StoredMeasure(self.turns + other.turns, self.text + other.text)

    def minus(self, other: StoredMeasure) -> StoredMeasure:
        return StoredMeasure(max(0, self.turns - other.turns), max(0, self.text - other.text))


def measure(items: Iterable[dict[str, Any]]) -> StoredMeasure:
    turns = text = 0
    for item in items:
        found = "".join(_texts(item))
        if found.strip():
            turns += 1
            text += len(found.encode("ascii", "ignore").translate(None, _BLANKS))
    return StoredMeasure(turns, text)


def _texts(item: dict[str, Any]) -> Iterable[str]:
    if item["type"] == "message" and item["role"] in _COUNTED:
        parts = item["content"]
    elif item["type"] in ("function_call_output", "custom_tool_call_output"):
        parts = item["output"]
    else:
        return []
    return [parts] if isinstance(parts, str) else [p.get("text") or "" for p in parts]


class Room:
    """A model's context window, against which items are measured."""

    def __init__(self, model: ServedModel) -> None:
        self._window = model.window
        self._tokenizer = model.tokenizer
        self._dialect = model.dialect

    def fewest_tokens(self, measured: StoredMeasure) -> int:
        if measured.text <= self._window * _SHORT_TOKEN:
            return measured.turns
        return max(measured.turns, self._tokenizer.fewest_of_ascii(measured.text))

    def fits(self, measured: StoredMeasure) -> bool:
        """False if no prompt with all these items has room; True if one may."""
        return self.fewest_tokens(measured) < self._window

    async def demand(self, measured: StoredMeasure) -> None:
        """Raise that these items cannot have room, unless the model's template leaves turns out."""
        if not self.fits(measured) and await asyncio.to_thread(lambda: self._dialect.keeps_turns):
            fewest = self.fewest_tokens(measured)
            raise ContextLengthExceeded(fewest, self._window, at_least=True)
