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
from millrace.models import short_names, store, suggestions
from millrace.models.resolve import DEFAULT
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
    """A model by its short name, which pull, serve and requests take."""

    name: str
    title: str
    """What its makers call it."""
    source: str
    """Its repository on Hugging Face."""
    uses: list[str]
    """Of chat, code, tools, thinking, pictures, embeddings."""
    good_for: str
    """The same as one text."""
    bits: int
    bytes: int
    """Of its weight files, which are fetched."""
    need_bytes: int
    """What it takes while it is loaded, about."""
    fits: bool
    fit_reason: str
    """Why it fits or not, in one sentence."""
    recommended: bool
    """Whether it is the best choice for this machine; true of one at most."""
    installed: bool
    """Whether it has been fetched already."""


class RecommendedModel(msgspec.Struct):
    """What `millrace serve auto` chooses on this machine."""

    name: str
    source: str
    bytes: int
    command: str
    """Fetches and serves it."""


class Library(msgspec.Struct):
    limit_bytes: int | None
    """What all models may take together."""
    reserved_bytes: int
    builtin: bool
    """Whether the only model named at the start is the small built-in one, for trying things out."""
    fetchable: bool
    """Whether other models can be fetched and are served then: not where only those named are (--only)."""
    recommended: RecommendedModel | None
    models: list[LibraryModel]
    suggested: list[SuggestedModel]


@router.get("/v1/library")
@describe("server", "The models on this machine, and which others would fit", answer=Library)
async def library(http: HttpRequest) -> Response:
    registry = context_of(http).registry
    standings = await registry.standings()
    named = {s.name for s in registry.named}
    models, suggested = await asyncio.to_thread(
        lambda: (
            [_model(registry, s.spec, s.facts, s.spec.name in named) for s in standings],
            _suggested(registry.limit),
        )
    )
    builtin = [s.folder for s in registry.named] == [store.models_home() / DEFAULT]
    best = next((s for s in suggested if s.recommended), None)
    return as_json(
        Library(
            registry.limit,
            registry.reserved,
            builtin,
            registry.is_open,
            None if best is None else _recommended(best),
            models,
            suggested,
        )
    )


def _recommended(best: SuggestedModel) -> RecommendedModel:
    return RecommendedModel(best.name, best.source, best.bytes, f"millrace serve {best.name}")


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
    best = suggestions.recommended(limit)
    return [_suggestion(model, limit, model == best) for model in short_names.all_names()]


def _suggestion(model: short_names.ShortName, limit: int | None, best: bool) -> SuggestedModel:
    fit = suggestions.fit(model, limit)
    return SuggestedModel(
        name=model.name,
        title=model.title,
        source=model.source,
        uses=list(model.uses),
        good_for=", ".join(model.uses),
        bits=model.bits,
        bytes=model.bytes,
        need_bytes=fit.need,
        fits=fit.fits,
        fit_reason=fit.reason,
        recommended=best,
        installed=store.is_whole_in_hub(model.source),
    )
