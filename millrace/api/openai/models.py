"""GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.context import context_of
from millrace.serving.model import ServedModel

router = APIRouter()


@router.get("/v1/models")
async def models(http: HttpRequest) -> Response:
    listed = [_describe(m) for m in context_of(http).registry.all()]
    return as_json({"object": "list", "data": listed})


@router.get("/v1/models/{name:path}")
async def model(http: HttpRequest, name: str) -> Response:
    return as_json(_describe(context_of(http).registry.get(name)))


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "millrace",
        "context_window": model.window,
        "max_model_len": model.window,
    }
