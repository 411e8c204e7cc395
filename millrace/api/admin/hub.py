"""GET /v1/hub/search: models on the Hugging Face hub, with their sizes and whether they fit here."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.body import read_query
from millrace.api.context import context_of
from millrace.api.openapi.describe import describe
from millrace.errors import NotAllowed
from millrace.models.hub_search import HubModel

router = APIRouter()

_LONGEST = 200
_MOST = 50


class HubQuery(msgspec.Struct):
    q: Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST)]
    """Words that the names of repositories have."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MOST)] = 20


class HubAnswer(msgspec.Struct):
    models: list[HubModel]


@router.get("/v1/hub/search")
@describe(
    "server",
    "Models on the Hugging Face hub that can be fetched",
    answer=HubAnswer,
    query=HubQuery,
    statuses=(400, 403, 429, 503),
)
async def hub_search(http: HttpRequest) -> Response:
    context = context_of(http)
    wanted = read_query(http, HubQuery)
    if not context.registry.is_open:
        raise NotAllowed(
            "This server serves the models it was started with and no others (--only), so the hub is not "
            "searched."
        )
    return as_json(
        HubAnswer(await context.hub.find(wanted.q, wanted.limit, context.registry.limit))
    )
