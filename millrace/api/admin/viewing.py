"""What the caller of an HTTP request is shown of others', and what the key of the caller is.

A key with the role `use` sees and cancels its own requests, and figures of all callers together; an
administrator, and everybody on a server without keys, sees all.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.admin.answers import KeyLimits, KeyStatus
from millrace.api.admin.status import StatusView
from millrace.api.answer import as_json
from millrace.api.callers import viewer_of
from millrace.api.context import context_of, known_caller
from millrace.api.openapi.describe import describe
from millrace.caller import current_caller
from millrace.serving import access

router = APIRouter()


def view_of(http: HttpRequest) -> StatusView:
    return StatusView(viewer_of(http), context_of(http).keys.label)


@router.get("/v1/key")
@describe(
    "server", "The role and the limits of the API key that the request came with", answer=KeyStatus
)
async def key(http: HttpRequest) -> Response:
    keys, caller = context_of(http).keys, known_caller(http)
    if caller is None:
        return as_json(KeyStatus(required=bool(keys), role="admin", limits=_limits(http)))
    refused = None if caller.is_admin else access.needs_admin("Administration", keys).message
    return as_json(
        KeyStatus(
            required=True,
            role=caller.role,
            name=caller.name or None,
            reason=refused,
            limits=_limits(http),
        )
    )


def _limits(http: HttpRequest) -> KeyLimits:
    quota = context_of(http).quotas.of(current_caller.get())
    found = KeyLimits(
        max_running=quota.limits.max_running,
        running=quota.running if quota.limits.max_running is not None else None,
        max_prompt_tokens=quota.limits.max_prompt_tokens,
        max_answer_tokens=quota.limits.max_answer_tokens,
    )
    for standing in quota.rates.standings(quota.owner) if quota.rates else ():
        setattr(found, f"rate_{standing.kind}", standing.limit)
        setattr(found, f"remaining_{standing.kind}", standing.remaining)
    return found
