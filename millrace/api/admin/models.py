"""Loading, unloading and pinning models by name, in millrace's own way and in llama.cpp's."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json, whole
from millrace.api.body import convert, read_object
from millrace.api.context import context_of
from millrace.api.leases import kept_for
from millrace.api.openai.answers import ModelCard
from millrace.api.openai.models import card_of
from millrace.api.openapi.describe import READS, describe
from millrace.errors import BadRequest

T = TypeVar("T")
router = APIRouter()
_STATUSES = (404, *READS, 500, 503, 507)


class LoadRequest(msgspec.Struct):
    ttl: float | str | None = None
    """Seconds, or a time like 5m, that it stays without use; below 0 for ever."""
    wait: bool = True
    """Whether to answer when it is loaded, or at once."""


class UnloadRequest(msgspec.Struct):
    wait: bool = True
    """Whether to answer when its memory is free again, or at once."""


class PinRequest(msgspec.Struct):
    pin: bool = True
    """False lets it go again when room is needed."""


class NamedModel(msgspec.Struct):
    model: str
    """As llama.cpp's server has it."""


class Done(msgspec.Struct):
    success: bool


@router.post("/v1/models/{name:path}/load")
@describe(
    "server",
    "Load a model",
    body=LoadRequest,
    answer=ModelCard,
    statuses=_STATUSES,
    needs_body=False,
)
async def load(http: HttpRequest, name: str) -> Response:
    wire = await _read(http, LoadRequest)
    registry = context_of(http).registry
    work = asyncio.ensure_future(registry.load(_said(name), ttl=kept_for(wire), wait=wire.wait))
    # Whoever leaves does not stop the load.
    await whole(http, asyncio.shield(work), lambda: None)
    return as_json(await card_of(http, name))


@router.post("/v1/models/{name:path}/unload")
@describe(
    "server",
    "Unload a model once it has answered what it was asked",
    body=UnloadRequest,
    answer=ModelCard,
    statuses=(404, *READS),
    needs_body=False,
)
async def unload(http: HttpRequest, name: str) -> Response:
    wire = await _read(http, UnloadRequest)
    work = context_of(http).registry.unload(_said(name), wait=wire.wait)
    await whole(http, work, lambda: None)
    return as_json(await card_of(http, name))


@router.post("/v1/models/{name:path}/pin")
@describe(
    "server",
    "Keep a model whatever else needs room, or no longer",
    body=PinRequest,
    answer=ModelCard,
    statuses=(404, *READS),
    needs_body=False,
)
async def pin(http: HttpRequest, name: str) -> Response:
    wire = await _read(http, PinRequest)
    await context_of(http).registry.pin(_said(name), wire.pin)
    return as_json(await card_of(http, name))


@router.post("/models/load")
@describe("llama.cpp", "Load a model", body=NamedModel, answer=Done, statuses=_STATUSES)
async def load_named(http: HttpRequest) -> Response:
    wire = convert(await read_object(http, context_of(http).config.max_body), NamedModel)
    await context_of(http).registry.load(_said(wire.model), wait=False)
    return as_json(Done(True))


@router.post("/models/unload")
@describe("llama.cpp", "Unload a model", body=NamedModel, answer=Done, statuses=(404, *READS))
async def unload_named(http: HttpRequest) -> Response:
    wire = convert(await read_object(http, context_of(http).config.max_body), NamedModel)
    await context_of(http).registry.unload(_said(wire.model), wait=False)
    return as_json(Done(True))


def _said(name: str) -> str:
    """A model's name, which must be said even where there is only one."""
    if not name:
        raise BadRequest("Say which model: its name is empty.", param="model")
    return name


async def _read(http: HttpRequest, type: type[T]) -> T:
    """A body may be left out."""
    if http.headers.get("content-length", "0") == "0" and "transfer-encoding" not in http.headers:
        return type()
    return convert(await read_object(http, context_of(http).config.max_body), type)
