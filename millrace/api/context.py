"""What every route needs to know: the models, the configuration, and a fresh id."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.requests import Request

from millrace.config import ServeConfig
from millrace.serving.registry import Registry


@dataclass(frozen=True)
class Context:
    registry: Registry
    config: ServeConfig


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def fresh_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
