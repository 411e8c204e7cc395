"""Errors on the wire, in the shape of the protocol they happened in: one table each."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millrace.api.context import context_of
from millrace.errors import (
    ContextLengthExceeded,
    MethodNotAllowed,
    MillraceError,
    Overloaded,
    Unauthorized,
    UnsupportedEncoding,
)
from millrace.serving import ids

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
    507: "server_error",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    507: "api_error",
}


log = logging.getLogger("millrace.api")
_LONGEST = 300
"""Characters of a path or a reason in the log."""
_COUNTED_BY_THE_CLIENT = (499, 500, 503, 504)
"""Statuses of requests that were under way, whose end has been counted already."""


def openai_error(error: MillraceError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: MillraceError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        # Agents know by these words that they must shorten the conversation.
        message = (
            f"prompt is too long: {error.prompt_tokens} tokens > {error.window} maximum. {message}"
        )
    reported: dict[str, Any] = {"type": kind, "message": message}
    if error.details is not None:
        reported["details"] = error.details
    return {"type": "error", "error": reported}


def ollama_error(error: MillraceError) -> dict[str, Any]:
    return {"error": error.message}


_TEI_TYPES = {429: "Overloaded", 499: "Cancelled", 500: "Backend", 503: "Unhealthy", 504: "Backend"}


def tei_error(error: MillraceError) -> dict[str, Any]:
    return {"error": error.message, "error_type": _TEI_TYPES.get(error.status, "Validation")}


Shape = Callable[[MillraceError], dict[str, Any]]
_SHAPES: dict[str, Shape] = {
    "/v1/messages": anthropic_error,
    "/api/": ollama_error,
    "/embed": tei_error,
}


def shape_of(path: str) -> Shape:
    """How errors look to the clients of a path."""
    return next((s for prefix, s in _SHAPES.items() if path.startswith(prefix)), openai_error)


def _request_id(request: Request) -> str | None:
    """The id that the client chose, unless it is one that is refused."""
    chosen = request.headers.get("x-request-id")
    return chosen if chosen is not None and ids.is_valid(chosen) else None


def _log_refusal(request: Request, error: MillraceError) -> None:
    """Why somebody was turned away, for whoever looks for their request in the log."""
    model = getattr(request.state, "asked_model", None)
    fields = {
        "status": error.status,
        "reason": error.message[:_LONGEST],
        "code": error.code,
        "param": error.param,
        "method": request.method,
        "path": request.url.path[:_LONGEST],
        "model": model[:_LONGEST] if isinstance(model, str) else None,
        "id": _request_id(request),
    }
    log.info("request refused", extra={"fields": fields})


async def respond(request: Request, error: Exception) -> Response:
    """The handler for every error of ours that reaches the top."""
    assert isinstance(error, MillraceError)
    route = request.scope.get("route")
    if error.status not in _COUNTED_BY_THE_CLIENT:
        if route is not None:
            context_of(request).metrics.refused(route.path, error.code)
        _log_refusal(request, error)
    headers: dict[str, str] = {}
    if chosen := _request_id(request):
        headers |= {"x-request-id": chosen, "request-id": chosen}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="millrace"'
    if getattr(request.state, "body_unread", False):
        headers["connection"] = "close"  # what follows is not read as a request
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = "identity"
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allow)
    return Response(
        msgspec.json.encode(shape_of(request.url.path)(error)),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )
