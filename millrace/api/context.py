"""What every route needs to know: the models, the configuration, and a fresh id."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from starlette.requests import Request

from millrace.config import ServeConfig
from millrace.errors import BadRequest
from millrace.serving.metrics import Metrics
from millrace.serving.registry import Registry

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True)
class Context:
    registry: Registry
    config: ServeConfig
    metrics: Metrics


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def request_id(request: Request, prefix: str) -> str:
    """The id that the client chose in `x-request-id`, else a fresh one."""
    chosen = request.headers.get("x-request-id")
    if chosen is None:
        return f"{prefix}{secrets.token_hex(12)}"
    if not _ID.fullmatch(chosen):
        raise BadRequest(
            "x-request-id must be 1 to 128 letters, digits, '-', '_', '.' or ':'.",
            param="x-request-id",
        )
    if any(m.client.knows(chosen) for m in context_of(request).registry.all()):
        raise BadRequest(f"A request with the id '{chosen}' is running.", param="x-request-id")
    return chosen
