"""GET /v1/library: the models on this machine, what each needs, the room there is, and what would fit."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.context import context_of
from millrace.api.openapi.describe import describe
from millrace.errors import MillraceError
from millrace.models import store, suggestions
from millrace.serving.catalogue import ModelSpec
from millrace.serving.facts import SpecFacts
from millrace.serving.registry import Registry

router = APIRouter()


class LibraryModel(msgspec.Struct):
    name: str
    aliases: list[str]
    disk_bytes: int | None
    """None where its files are broken or missing."""
    need_bytes: int | None
    """What it takes at least while it is loaded."""
    fits: bool
    """Whether it could be loaded at all."""
    named: bool
    """Given when the server was started: such a one is not removed while it runs."""
    removable: bool
    architecture: str | None = None
    quantization: str | None = None
    parameters: int | None = None
    error: str | None = None
    """What is broken or missing in its files."""


class SuggestedModel(msgspec.Struct):
    name: str
    source: str
    good_for: str
    bytes: int
    need_bytes: int
    fits: bool


class Library(msgspec.Struct):
    limit_bytes: int | None
    """What all models may take together."""
    reserved_bytes: int
    models: list[LibraryModel]
    suggested: list[SuggestedModel]


@router.get("/v1/library")
@describe("server", "The models on this machine, and which others would fit", answer=Library)
async def library(http: HttpRequest) -> Response:
    registry = context_of(http).registry
    standings = await registry.standings()
    named = {s.name for s in registry.named}
    models = await asyncio.to_thread(
        lambda: [_model(registry, s.spec, s.facts, s.spec.name in named) for s in standings]
    )
    return as_json(Library(registry.limit, registry.reserved, models, _suggested(registry.limit)))


def _model(registry: Registry, spec: ModelSpec, facts: SpecFacts, named: bool) -> LibraryModel:
    need, error, about = None, facts.error, facts.about
    if error is None:
        try:
            need = registry.need(spec).smallest
        except MillraceError as problem:
            error = problem.message
    fits = need is not None and (registry.limit is None or need <= registry.limit)
    return LibraryModel(
        name=spec.name,
        aliases=list(spec.aliases),
        disk_bytes=about.bytes if about else None,
        need_bytes=need,
        fits=fits,
        named=named,
        removable=not named and _is_own(spec),
        architecture=about.architecture if about else None,
        quantization=(about.quantization or about.dtype) if about else None,
        parameters=about.parameters if about else None,
        error=error,
    )


def _is_own(spec: ModelSpec) -> bool:
    """Whether it lies in millrace's own store, from which alone models are removed over HTTP."""
    return spec.folder.parent == store.models_home()


def _suggested(limit: int | None) -> list[SuggestedModel]:
    return [
        SuggestedModel(s.name, s.source, s.good_for, s.bytes, need, limit is None or need <= limit)
        for s in suggestions.SUGGESTIONS
        if (need := suggestions.need(s))
    ]
