"""GET /v1/models and /v1/models/{name}.

OpenAI and Anthropic have this path in common; what each calls things stands side by side.
"""

from __future__ import annotations

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
    listed = [_describe(m) for m in context.registry.all()]
    listed += [_describe(context.registry.get(name), name) for name in context.config.aliases]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
    return as_json({"object": "list", "data": listed} | ends)


@router.get("/v1/models/{name:path}")
@describe("openai", "One model", answer=ModelCard, statuses=(404,))
async def model(http: HttpRequest, name: str) -> Response:
    context = context_of(http)
    alias = name if name in context.config.aliases else None
    return as_json(_describe(context.registry.get(name), alias))


def _describe(model: ServedModel, alias: str | None = None) -> dict[str, Any]:
    described = {
        "id": alias or model.name,
        "object": "model",
        "type": "model",
        "display_name": alias or model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "created": model.created,
        "owned_by": "millrace",
        "context_window": model.window,
        "max_model_len": model.window,
    }
    return described if alias is None else described | {"alias_of": model.name}
