"""The HTTP application: its routes, and what happens to what no route handles."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from millrace.api import errors
from millrace.api.admin import routes as admin
from millrace.api.context import Context
from millrace.api.openai import chat, completions, models
from millrace.errors import BadRequest, MillraceError, NotFound, RequestFailed
from millrace.version import __version__


def create_app(context: Context) -> FastAPI:
    app = FastAPI(title="millrace", version=__version__)
    app.state.context = context
    for module in (chat, completions, models, admin):
        app.include_router(module.router)
    app.add_exception_handler(MillraceError, errors.respond)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        ours: MillraceError = NotFound(f"There is no {request.method} {request.url.path} here.")
    else:
        ours = BadRequest(f"{request.method} {request.url.path}: {error.detail}.")
        ours.status = error.status_code
    return await errors.respond(request, ours)


async def _unexpected(request: Request, error: Exception) -> Response:
    return await errors.respond(
        request, RequestFailed(f"The server met an unexpected error: {type(error).__name__}.")
    )
