"""Filling the prefix cache ahead of time: prompts that are run so that their state is there.

What is wanted is the state, so one token is made and thrown away. Warming gives way to every request
that somebody waits for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from millrace.errors import BadRequest, MillraceError, SetupError
from millrace.protocol import Sampling
from millrace.serving.model import Running, ServedModel
from millrace.serving.request import Request
from millrace.text.borders import opening
from millrace.text.dialect import Conversation

log = logging.getLogger("millrace.serving")

_LAST = -1000
"""The lowest priority that a request can have."""


class Talk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation to be warmed; without a user's message, all that comes before one."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a warm-up file: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""

    @property
    def item(self) -> str | Talk:
        if self.messages:
            return Talk(self.messages, self.tools, self.chat_template_kwargs)
        return self.prompt or ""


class Warmed(msgspec.Struct):
    prompt_tokens: int
    cached_tokens: int
    """Those of them whose state was there already."""
    prefilled_tokens: int


def request_of(model: ServedModel, item: str | Talk, salt: str = "") -> Request:
    """A request that leaves the item's state behind. Renders: not for the event loop."""
    id = f"warm-{secrets.token_hex(8)}"
    if isinstance(item, str):
        request = Request(id=id, prompt=model.text_prompt(item))
    else:
        request = _conversation(model, id, item)
    request.sampling = Sampling(temperature=0.0)
    request.max_tokens = 1
    request.ignore_eos = True
    request.priority = _LAST
    request.cache_salt = salt
    return request


def _conversation(model: ServedModel, id: str, item: Talk) -> Request:
    chat = Conversation(
        messages=item.messages,
        tools=item.tools,
        template_arguments=dict(item.chat_template_kwargs),
    )
    if any(m.get("role") == "user" for m in item.messages):
        request = model.chat(id, chat)
        request.chat = None
        return request
    return Request(id=id, prompt=model.tokenizer.encode(opening(model.dialect, chat)))


async def finish(running: Running) -> Warmed:
    """Wait for such a request to be done."""
    try:
        async for _ in running.events():
            pass
    finally:
        running.close()
    usage = running.usage
    return Warmed(usage.prompt, usage.cached, usage.prompt - usage.cached)


def read_file(file: str) -> list[Line]:
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
            read = msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError as error:
            raise SetupError(f"--warm {file}, line {number}: {error}.") from error
        if bool(read.prompt) == bool(read.messages):
            raise SetupError(f"--warm {file}, line {number}: give a prompt or messages.")
        found.append(read)
    return found


async def warm_up(model: ServedModel, lines: Sequence[Line], told: Callable[[str], None]) -> None:
    """Run them one after the other; one that cannot be run is skipped, and said so."""
    run = cached = 0
    for number, line in enumerate(lines, 1):
        try:
            request = await asyncio.to_thread(request_of, model, line.item, line.cache_salt)
            done = await finish(model.run(request))
        except BadRequest as error:
            log.warning("--warm: prompt %d cannot be run: %s", number, error.message)
            continue
        except MillraceError as error:
            log.warning("--warm: stopped at prompt %d: %s", number, error.message)
            return
        run += done.prefilled_tokens
        cached += done.cached_tokens
        told(
            f"warming the cache: {number} of {len(lines)} prompts, "
            f"{run:,} tokens run, {cached:,} were there"
        )
