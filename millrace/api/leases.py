"""A request's claims on models: made when its model is known, let go of when its response is sent.

What runs on after the response, as background work does, holds its model by itself.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.api.context import context_of
from millrace.durations import seconds_of
from millrace.errors import BadRequest
from millrace.serving.capability import Gives
from millrace.serving.instance import Lease
from millrace.serving.model import ServedModel
from millrace.serving.registry import UNSAID

STAYS = ("keep_alive", "ttl")
"""Fields of requests that say how long their model stays loaded."""
LATEST = ":latest"
"""Ollama's clients say NAME and NAME:latest, and mean the same."""


class LeaseMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        leases: list[Lease] = []
        scope.setdefault("state", {})["leases"] = leases
        try:
            await self._app(scope, receive, send)
        finally:
            for lease in leases:
                lease.release()


async def leased(
    http: HttpRequest,
    name: str | None,
    *,
    loads: bool = True,
    ttl: float | None = UNSAID,
    gives: Gives | None = None,
) -> ServedModel:
    """The model that a request names, which stays until the response is sent.

    One that gives something else than what is wanted is an error, and is not loaded for it.
    """
    registry = context_of(http).registry
    lease = await registry.lease(*spellings(http, name), loads=loads, ttl=ttl, gives=gives)
    http.scope["state"]["leases"].append(lease)
    lease.model.check_gives(gives)
    return lease.model


def all_loaded(http: HttpRequest) -> list[ServedModel]:
    """The models whose engines were started, which stay until the response is sent."""
    leases = context_of(http).registry.hold_loaded()
    http.scope["state"]["leases"].extend(leases)
    return [lease.model for lease in leases]


def spellings(http: HttpRequest, name: str | None) -> tuple[str | None, ...]:
    if name is not None and http.url.path.startswith("/api/") and name.endswith(LATEST):
        return name, name.removesuffix(LATEST)
    return (name,)


def kept_for(wire: Any) -> float | None:
    """Seconds that the request wants its model to stay after it; None is for ever."""
    for field in STAYS:
        if (value := getattr(wire, field, None)) is not None:
            try:
                seconds = seconds_of(value)
            except ValueError as error:
                raise BadRequest(f"'{field}' {error}.", param=field) from None
            return None if seconds < 0 else seconds
    return UNSAID
