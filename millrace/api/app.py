"""The HTTP application: its routes, and what happens to what no route handles."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from millrace.api import documents, errors, middleware
from millrace.api.admin import adapters, cache, hub, library, viewing, watching
from millrace.api.admin import models as control
from millrace.api.admin import routes as admin
from millrace.api.anthropic import routes as anthropic
from millrace.api.bare_paths import BarePathMiddleware
from millrace.api.body_budget import TrimMiddleware
from millrace.api.callers import permitted
from millrace.api.context import Context
from millrace.api.encode import embeddings, pooling, rerank
from millrace.api.generate import routes as generate
from millrace.api.leases import LeaseMiddleware
from millrace.api.methods import HeadMiddleware, methods_of
from millrace.api.ollama import routes as ollama
from millrace.api.openai import chat, completions, models
from millrace.api.openapi import routes as openapi
from millrace.api.openapi.routing import flat
from millrace.api.request_pacing import RequestPacingMiddleware
from millrace.api.responses import compact, conversations, create, stored
from millrace.api.stripped_header import StrippedHeader
from millrace.api.web import pages
from millrace.errors import BadRequest, MethodNotAllowed, MillraceError, NotFound, RequestFailed


def create_app(context: Context) -> FastAPI:
    roles = [Depends(permitted)] if context.keys else []
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, dependencies=roles)
    app.state.context = context
    for module in (
        chat,
        completions,
        models,
        anthropic,
        create,
        compact,
        stored,
        conversations,
        generate,
        embeddings,
        rerank,
        pooling,
        ollama,
        admin,
        watching,
        viewing,
        library,
        hub,
        cache,
        control,
        adapters,
        documents,
        openapi,
    ):
        app.include_router(module.router)
    app.router.routes.insert(0, pages.route)  # a page asks for dozens of files at once
    app.add_middleware(HeadMiddleware)
    app.add_middleware(LeaseMiddleware)
    if context.config.engine.strip_volatile:
        app.add_middleware(StrippedHeader)
    middleware.install(app, context)
    app.add_middleware(TrimMiddleware)
    app.add_middleware(RequestPacingMiddleware)
    app.add_middleware(BarePathMiddleware, own=[route.path for route in flat(app.routes)])
    app.add_exception_handler(MillraceError, errors.respond)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        ours: MillraceError = NotFound(f"There is no {request.method} {request.url.path} here.")
    elif error.status_code == 405:
        ours = MethodNotAllowed(
            f"{request.method} {request.url.path}: {error.detail}.",
            allow=methods_of(request.app, request.scope["path"]),
        )
    else:
        ours = BadRequest(f"{request.method} {request.url.path}: {error.detail}.")
        ours.status = error.status_code
    return await errors.respond(request, ours)


async def _nobody(request: Request, error: Exception) -> Response:
    """A client that left while it was still sending: this reaches nobody."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    failed = RequestFailed(f"The server met an unexpected error: {type(error).__name__}.")
    response = await errors.respond(request, failed)
    response.headers["connection"] = "close"  # as uvicorn will after an exception
    return response
