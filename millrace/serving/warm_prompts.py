"""Prompts to be run ahead of time, so that their state is in the prefix cache: as data, and as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from millrace.errors import SetupError


class Talk(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What decides the prompt of a chat request, in OpenAI's terms.

    Without a user's message, all that comes before one is meant.
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class WarmUpLine(Talk, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A line of a warm-up file: a text, or a conversation."""

    messages: list[dict[str, Any]] = []
    prompt: str = ""
    cache_salt: str = ""

    @property
    def item(self) -> str | Talk:
        if self.prompt:
            return self.prompt
        return Talk(*(getattr(self, name) for name in Talk.__struct_fields__))


class Warmed(msgspec.Struct):
    prompt_tokens: int
    cached_tokens: int
    """Those of them whose state was there already."""
    prefilled_tokens: int


def read_file(file: str) -> list[WarmUpLine]:
    """A warm-up file: an object a line; raises what is wrong with which line."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--warm {file} cannot be read: {error}.") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=WarmUpLine)
        except msgspec.DecodeError as error:
            raise SetupError(f"--warm {file}, line {number}: {error}.") from error
        if bool(read.prompt) == bool(read.messages):
            raise SetupError(f"--warm {file}, line {number}: give a prompt or messages.")
        found.append(read)
    return found
