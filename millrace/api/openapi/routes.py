"""GET /openapi.json, and /docs: a page of our own, since users may have no internet."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from millrace.api.context import context_of
from millrace.api.openapi.describe import describe
from millrace.api.openapi.document import build
from millrace.api.openapi.routing import flat

router = APIRouter()
_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


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
    return Response(
        _PAGE.read_bytes(),
        media_type="text/html",
        headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"},
    )
