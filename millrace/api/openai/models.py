"""GET /v1/models and /v1/models/{name}.

OpenAI and Anthropic have this path in common; Anthropic's clients are known by their version header.
"""

from __future__ import annotations

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
from millrace.serving.model import ServedModel

router = APIRouter()


@router.get("/v1/models")
@describe("openai", "The models that are served, under all their names", answer=ModelList)
async def models(http: HttpRequest) -> Response:
    context = context_of(http)
    card = _describer(http)
    listed = [card(m, None) for m in context.registry.all()]
    listed += [card(context.registry.get(name), name) for name in context.config.aliases]
    if _is_anthropic(http):
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        return as_json({"data": listed} | ends)
    return as_json({"object": "list", "data": listed})


@router.get("/v1/models/{name:path}")
@describe("openai", "One model", answer=ModelCard, statuses=(404,))
async def model(http: HttpRequest, name: str) -> Response:
    context = context_of(http)
    alias = name if name in context.config.aliases else None
    return as_json(_describer(http)(context.registry.get(name), alias))


def _is_anthropic(http: HttpRequest) -> bool:
    return "anthropic-version" in http.headers


def _describer(http: HttpRequest) -> Callable[[ServedModel, str | None], dict[str, Any]]:
    return _anthropic if _is_anthropic(http) else _openai


def _openai(model: ServedModel, alias: str | None) -> dict[str, Any]:
    described = {
        "id": alias or model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "millrace",
        "context_window": model.window,
        "max_model_len": model.window,
    }
    return described if alias is None else described | {"alias_of": model.name}


def _anthropic(model: ServedModel, alias: str | None) -> dict[str, Any]:
    return {
        "type": "model",
        "id": alias or model.name,
        "display_name": alias or model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.window,
        "max_tokens": model.window,
    }
