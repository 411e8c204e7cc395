"""What the caller of an HTTP request is shown of others', and what the key of the caller is.

A key with the role `use` sees and cancels its own requests, and figures of all callers together; an
administrator, and everybody on a server without keys, sees all.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.admin.answers import KeyStatus
from millrace.api.admin.status import StatusView
from millrace.api.answer import as_json
from millrace.api.callers import viewer_of
from millrace.api.context import context_of, known_caller
from millrace.api.openapi.describe import describe
from millrace.serving import access

router = APIRouter()


def view_of(http: HttpRequest) -> StatusView:
    return StatusView(viewer_of(http), context_of(http).keys.label)


@router.get("/v1/key")
@describe("server", "The role of the API key that the request came with", answer=KeyStatus)
async def key(http: HttpRequest) -> Response:
    keys, caller = context_of(http).keys, known_caller(http)
    if caller is None:
        return as_json(KeyStatus(required=bool(keys), role="admin"))
    refused = None if caller.is_admin else access.needs_admin("Administration", keys).message
    return as_json(
        KeyStatus(required=True, role=caller.role, name=caller.name or None, reason=refused)
    )
