"""GET /openapi.json, and /docs: a page of our own, since users may have no internet."""

from __future__ import annotations

import functools

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from millrace.api.context import context_of
from millrace.api.openapi.describe import describe
from millrace.api.openapi.document import build
from millrace.api.openapi.routing import flat
from millrace.api.web import pages

router = APIRouter()


@router.get("/openapi.json")
@describe("server", "This description")
async def document(http: Request) -> Response:
    keyed = bool(context_of(http).config.api_keys)
    return Response(_encoded(http.app, keyed), media_type="application/json")


@functools.lru_cache(maxsize=1)
def _encoded(app: FastAPI, keyed: bool) -> bytes:
    return msgspec.json.encode(build(flat(app.routes), keyed=keyed))


@router.get("/docs")
@describe("server", "This description as a page", media="text/html")
async def page() -> Response:
    return pages.as_html("docs.html")
