"""The prefix cache over HTTP: what it holds, emptying it, and filling it ahead of time."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, get_args

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json, whole
from millrace.api.cache_warming import finish, request_of
from millrace.api.context import context_of
from millrace.api.leases import all_loaded, leased
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border, ignored_header
from millrace.api.running import run
from millrace.errors import BadRequest
from millrace.protocol.prefixes import HitKind, TierReport
from millrace.serving.model import ServedModel
from millrace.serving.ranges import Salt
from millrace.serving.warm_prompts import Talk, Warmed

router = APIRouter()
_NO_HITS: dict[HitKind, int] = dict.fromkeys(get_args(HitKind), 0)


class ModelCache(msgspec.Struct):
    name: str
    enabled: bool
    memory: TierReport
    disk: TierReport | None
    """None where the disk is not used."""
    hits: dict[HitKind, int]
    """Requests by what was found for them."""


class CacheAnswer(msgspec.Struct):
    models: list[ModelCache]


class DroppedCache(msgspec.Struct):
    name: str
    memory_bytes: int
    disk_bytes: int


class DropAnswer(msgspec.Struct):
    dropped: list[DroppedCache]


class WarmRequest(msgspec.Struct):
    model: str | None = None
    prompts: list[Annotated[str, Meta(min_length=1)]] = []
    conversations: list[Talk] = []
    cache_salt: Salt | None = None


_WARMING = Border(WarmRequest, answers=False)


class WarmAnswer(msgspec.Struct):
    items: list[Warmed]
    """The prompts, then the conversations, in their order."""
    prefilled_tokens: int
    cached_tokens: int
    object: Literal["cache.warmed"] = "cache.warmed"


class CacheSelection(msgspec.Struct):
    model: str | None = None
    """All of them if left out."""


@router.get("/v1/cache")
@describe(
    "server",
    "What the prefix cache holds",
    answer=CacheAnswer,
    query=CacheSelection,
    statuses=(404, 503),
)
async def cache(http: HttpRequest) -> Response:
    models = await _models(http)
    reports = await asyncio.gather(*(m.client.cache() for m in models))
    reported = [
        ModelCache(m.name, r.enabled, r.memory, r.disk, _NO_HITS | r.hits)
        for m, r in zip(models, reports, strict=True)
    ]
    return as_json(CacheAnswer(reported))


@router.delete("/v1/cache")
@describe(
    "server",
    "Empty the prefix cache, in memory and on disk",
    answer=DropAnswer,
    query=CacheSelection,
    statuses=(404, 503),
)
async def drop_cache(http: HttpRequest) -> Response:
    return as_json(DropAnswer([await drop(m) for m in await _models(http)]))


async def drop(model: ServedModel) -> DroppedCache:
    """Empty a model's cache; tells what it held."""
    held = await model.client.cache()
    await model.client.cache(clear=True)
    return DroppedCache(model.name, held.memory.bytes, held.disk.bytes if held.disk else 0)


@router.post("/v1/cache/warm")
@describe(
    "server",
    "Run prompts so that their state is cached; answers when it is",
    body=WarmRequest,
    answer=WarmAnswer,
    statuses=RUNS,
)
async def warm(http: HttpRequest) -> Response:
    asked = await _WARMING.read(http)
    wire, model = asked.wire, asked.model
    items: list[str | Talk] = [*wire.prompts, *wire.conversations]
    if not items:
        raise BadRequest("Give 'prompts', 'conversations', or both.", param="prompts")
    if not context_of(http).config.engine.cache:
        raise BadRequest("The prefix cache of this server is off (--no-cache).")
    salt = wire.cache_salt or ""
    done = await whole(http, _warmed(http, model, items, salt), lambda: None)
    answer = WarmAnswer(
        done, sum(d.prefilled_tokens for d in done), sum(d.cached_tokens for d in done)
    )
    return as_json(answer, ignored_header(asked.ignored))


async def _warmed(
    http: HttpRequest, model: ServedModel, items: list[str | Talk], salt: str
) -> list[Warmed]:
    """One after the other: what one leaves behind, the next need not run."""
    done = []
    for item in items:
        request = await request_of(model, item, salt)
        done.append(await finish(run(http, model, request)))
    return done


async def _models(http: HttpRequest) -> list[ServedModel]:
    """The one that is named, else all that are loaded."""
    name = http.query_params.get("model")
    return [await leased(http, name, loads=False)] if name else all_loaded(http)
