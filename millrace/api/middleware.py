"""What stands before every route: keys, rate limits, the caller, allowed web pages, allowed host names.

Plain ASGI: a response passes through as it is made, and a disconnect is heard by the route itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.api import errors
from millrace.api.callers import is_limited, is_open, uses_tokens
from millrace.api.context import Context
from millrace.api.hosts import HostMiddleware, names_of
from millrace.api.openapi.routing import flat
from millrace.api.origins import OriginMiddleware
from millrace.caller import Departure, current_caller, current_departure
from millrace.errors import MillraceError, RateLimited, Unauthorized
from millrace.serving.keys import Caller, Keys, secrets_in
from millrace.serving.limits import LimitStanding, RateLimits
from millrace.serving.metrics import Metrics

_EXPOSED_HEADERS = (
    "x-request-id",
    "x-millrace-ignored",
    "x-millrace-stripped",
    "retry-after",
    "www-authenticate",
    *(f"x-ratelimit-{w}-requests" for w in ("limit", "remaining", "reset")),
    *(f"x-ratelimit-{w}-tokens" for w in ("limit", "remaining", "reset")),
)
"""Headers that a page may read."""


def install(app: FastAPI, context: Context) -> None:
    """From the inside out: caller, limits, keys, pages' origins, names; so that preflights need no key.

    What a foreign page asks for is refused whatever key its browser may send along.
    """
    config, metrics = context.config, context.metrics
    app.add_middleware(CallerMiddleware)
    if rates := context.quotas.rates:
        app.add_middleware(RateLimitMiddleware, limits=rates, metrics=metrics)
    if keys := context.keys:
        app.add_middleware(KeyMiddleware, keys=keys, metrics=metrics)
    app.add_middleware(OriginMiddleware, allowed=config.cors_origins)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
            max_age=86400,
        )
    if (names := names_of(config)) is not None:
        app.add_middleware(HostMiddleware, names=names)


class KeyMiddleware:
    """Lets in who has a key, and notes who it is."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        given = secrets_in(scope["headers"])
        caller = self._keys.find(given)
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)
        elif given:
            error = Unauthorized("The API key is not one of this server's.")
            await _refuse(scope, receive, send, error, self._metrics)
        else:
            error = Unauthorized(
                "This server needs an API key: send it as 'Authorization: Bearer KEY' "
                "or as 'x-api-key: KEY'."
            )
            await _refuse(scope, receive, send, error, self._metrics)


def _is_open(scope: Scope) -> bool:
    return scope["type"] == "http" and is_open(scope["path"])


class CallerMiddleware:
    """Names the caller to the queues that share work between callers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            current_caller.set(_caller(scope))
            departure = scope.setdefault("state", {})["departure"] = Departure()
            current_departure.set(departure)
        await self._app(scope, receive, send)


class RateLimitMiddleware:
    """Holds each key to its share, or each address where there are no keys."""

    def __init__(
        self,
        app: ASGIApp,
        limits: RateLimits,
        metrics: Metrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_limited(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        caller = _caller(scope)
        state["admit_prompts"] = functools.partial(self._limits.admit_prompts, caller)

        async def reporting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._report(MutableHeaders(scope=message), caller, scope["path"])
            await send(message)

        try:
            self._limits.admit(caller, tokens=uses_tokens(scope["method"]))
        except RateLimited as error:
            await _refuse(scope, receive, reporting, error, self._metrics)
        else:
            await self._app(scope, receive, reporting)

    def _report(self, headers: MutableHeaders, caller: str, path: str) -> None:
        for standing in self._limits.standings(caller):
            for name, value in openai_headers(standing).items():
                headers[name] = value
            if path.startswith("/v1/messages"):
                for name, value in anthropic_headers(standing, self._now()).items():
                    headers[name] = value


def _caller(scope: Scope) -> str:
    caller = scope.get("state", {}).get("caller")
    if isinstance(caller, Caller):
        return caller.id
    return str(scope["client"][0]) if scope.get("client") else ""


async def _refuse(
    scope: Scope, receive: Receive, send: Send, error: MillraceError, metrics: Metrics
) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    # Paths are the caller's own words: only those that are routes become labels.
    paths = {route.path for route in flat(scope["app"].routes)}
    metrics.refused(scope["path"] if scope["path"] in paths else "", error.code)
    response = await errors.respond(Request(scope), error)
    await response(scope, receive, send)


def openai_headers(standing: LimitStanding) -> dict[str, str]:
    kind = standing.kind
    return {
        f"x-ratelimit-limit-{kind}": str(standing.limit),
        f"x-ratelimit-remaining-{kind}": str(standing.remaining),
        f"x-ratelimit-reset-{kind}": duration(standing.reset),
    }


def anthropic_headers(standing: LimitStanding, now: datetime) -> dict[str, str]:
    name = f"anthropic-ratelimit-{standing.kind}"
    whole = (now + timedelta(seconds=math.ceil(standing.reset))).replace(microsecond=0)
    return {
        f"{name}-limit": str(standing.limit),
        f"{name}-remaining": str(standing.remaining),
        f"{name}-reset": whole.isoformat().replace("+00:00", "Z"),
    }


def duration(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `4.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
