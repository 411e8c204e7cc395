"""GET /v1/models and /v1/models/{name}.

OpenAI and Anthropic have this path in common; Anthropic's clients are known by their version header.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.context import context_of
from millrace.api.openai.answers import ModelCard, ModelList
from millrace.api.openapi.describe import describe
from millrace.api.timestamps import moment
from millrace.serving.adapters import ServedAdapter
from millrace.serving.memory import memory_of
from millrace.serving.pictures import takes_in
from millrace.serving.registry import Registry, Standing

router = APIRouter()
_CREATED = int(time.time())
"""When this server came to be, which is all that it knows of its models' beginnings."""


@router.get("/v1/models")
@describe("openai", "The models that can be asked for, under all their names", answer=ModelList)
async def models(http: HttpRequest) -> Response:
    card = _describer(http)
    listed = []
    for standing in await context_of(http).registry.standings():
        listed += [card(standing, a) for a in (None, *standing.spec.aliases)]
        adapters = context_of(http).registry.adapters.of(standing.spec.name)
        listed += [_adapted(card(standing, None), a) for a in adapters.all()]
    if _is_anthropic(http):
        ids = [c["id"] for c in listed] or [None]
        return as_json({"data": listed, "first_id": ids[0], "last_id": ids[-1], "has_more": False})
    return as_json({"object": "list", "data": listed})


@router.get("/v1/models/{name:path}")
@describe("openai", "One model", answer=ModelCard, statuses=(404,))
async def model(http: HttpRequest, name: str) -> Response:
    return as_json(await card_of(http, name))


async def card_of(http: HttpRequest, name: str) -> dict[str, Any]:
    registry = context_of(http).registry
    adapter = registry.adapters.find(name)
    standing = await registry.standing_of(name)
    alias = name if name in standing.spec.aliases else None
    card = _describer(http)(standing, alias)
    return _adapted(card, adapter[1]) if adapter else card


def _adapted(card: dict[str, Any], adapter: ServedAdapter) -> dict[str, Any]:
    """An adapter's card: its model's, under its own name."""
    if "display_name" in card:
        return card | {"id": adapter.name, "display_name": adapter.name}
    own = {"id": adapter.name, "created": adapter.created, "root": adapter.path}
    return card | own | {"parent": card["id"]}


def _is_anthropic(http: HttpRequest) -> bool:
    return "anthropic-version" in http.headers


Describer = Callable[[Standing, str | None], dict[str, Any]]


def _describer(http: HttpRequest) -> Describer:
    registry = context_of(http).registry
    return _anthropic if _is_anthropic(http) else functools.partial(_openai, registry)


def _openai(registry: Registry, standing: Standing, alias: str | None) -> dict[str, Any]:
    spec, facts = standing.spec, standing.facts
    described: dict[str, Any] = {
        "id": alias or spec.name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "millrace",
        "context_window": standing.window,
        "max_model_len": standing.window,
        "input_modalities": takes_in(spec.folder),
        "output_modalities": [facts.makes or "text"],
        "state": standing.state,
        "pinned": registry.pinned(spec),
    }
    if standing.instance is not None:
        described["memory"] = memory_of(standing.instance)
        if standing.state == "loading":
            described["stage"] = standing.instance.client.stage
        if (expires := moment(standing.instance.expires)) is not None:
            described["expires_at"] = expires
    if standing.failure is not None:
        described["error"] = standing.failure
    if facts.defaults:
        described["default_sampling_params"] = facts.defaults
    if spec.profile:
        described["profile"] = spec.profile
    return described if alias is None else described | {"alias_of": spec.name}


def _anthropic(standing: Standing, alias: str | None) -> dict[str, Any]:
    described = {
        "type": "model",
        "id": alias or standing.spec.name,
        "display_name": alias or standing.spec.name,
        "created_at": datetime.fromtimestamp(_CREATED, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": standing.window,
        "max_tokens": standing.window,
    }
    if standing.failure is not None:
        # Anthropic has no words for it; clients pass over fields that they do not know.
        described |= {"state": standing.state, "error": standing.failure}
    return described
