"""Filling the prefix cache ahead of time.

What is wanted is the state, so one token is made and thrown away. Conversations take the way of chat
requests, so that these find it. Warming gives way to every request that somebody waits for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

import msgspec

from millrace.api.body import convert
from millrace.api.openai.chat import conversation_of
from millrace.api.openai.schema import ChatRequest
from millrace.api.openai.tools import offer_of
from millrace.errors import BadRequest, MillraceError
from millrace.protocol import Sampling
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.running import Running
from millrace.serving.warm_prompts import Talk, Warmed, WarmUpLine
from millrace.text.conversation import Conversation

log = logging.getLogger("millrace.api")

_LAST = -1000
"""The lowest priority that a request can have."""


async def request_of(model: ServedModel, item: str | Talk, salt: str = "") -> Request:
    """A request that leaves the item's state behind."""
    id = f"warm-{secrets.token_hex(8)}"
    if isinstance(item, str):
        request = Request(id=id, prompt=await asyncio.to_thread(model.text_prompt, item))
    else:
        talk = item
        request = await prepared(
            model.pictures,
            lambda: _conversation(model, talk),
            lambda chat: _written(model, id, chat),
        )
    request.sampling = Sampling(temperature=0.0)
    request.max_tokens = 1
    request.ignore_eos = True
    request.priority = _LAST
    request.cache_salt = salt
    request.specprefill = False  # of what is left out nothing would be there
    return request


def _conversation(model: ServedModel, item: Talk) -> Conversation:
    raw = msgspec.to_builtins(item)
    wire = convert(raw, ChatRequest)
    return conversation_of(raw, wire, offer_of(wire), model.dialect)


def _written(model: ServedModel, id: str, chat: Conversation) -> Request:
    if any(turn.role == "user" for turn in chat.messages):
        request = model.chat(id, chat)
        request.chat = None
        return request
    prompt = model.opening(chat)
    return Request(id=id, prompt=prompt.tokens, stripped=prompt.stripped)


async def finish(running: Running) -> Warmed:
    """Wait for such a request to be done."""
    try:
        async for _ in running.events():
            pass
    finally:
        running.close()
    usage = running.usage
    return Warmed(usage.prompt, usage.cached, usage.prompt - usage.cached)


async def warm_up(model: ServedModel, lines: Sequence[WarmUpLine]) -> None:
    """Run them one after the other; one that cannot be run is skipped, and said so."""
    run = found = 0
    for number, line in enumerate(lines, 1):
        try:
            request = await request_of(model, line.item, line.cache_salt)
            request.endpoint = "--warm"
            done = await finish(model.run(request))
        except BadRequest as error:
            log.warning("--warm: prompt %d cannot be run: %s", number, error.message)
            continue
        except MillraceError as error:
            log.warning("--warm: stopped at prompt %d: %s", number, error.message)
            return
        run += done.prefilled_tokens
        found += done.cached_tokens
        log.info(
            "warming the cache: %d of %d prompts, %d tokens run, %d were there",
            number,
            len(lines),
            run,
            found,
        )
