"""For those who look on: the status and the log as streams, and the requests that ran last."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.admin.answers import Requests, StatusEvent
from millrace.api.admin.feed import event
from millrace.api.admin.log_lines import MOST_LINES
from millrace.api.admin.status import running_requests
from millrace.api.admin.viewing import view_of
from millrace.api.answer import EventStream, as_json
from millrace.api.body import read_query
from millrace.api.context import context_of
from millrace.api.errors import openai_error
from millrace.api.openapi.describe import SSE, describe
from millrace.serving.history import MOST_ENDED

router = APIRouter()


class RequestsWanted(msgspec.Struct):
    limit: Annotated[int, Meta(ge=0, le=MOST_ENDED)] = 100
    """How many of those that have ended."""


class LinesWanted(msgspec.Struct):
    level: Literal["debug", "info", "warning", "error"] = "info"
    tail: Annotated[int, Meta(ge=0, le=MOST_LINES)] = 200
    """How many of the last lines come first."""


class LogLine(msgspec.Struct):
    """With the fields that the line is about, the request's id above all."""

    time: str
    level: str
    logger: str
    message: str
    trace: str | None = None


@router.get("/v1/requests")
@describe(
    "server",
    "The requests that run, and the last that ended",
    answer=Requests,
    query=RequestsWanted,
    statuses=(400,),
)
async def requests(http: HttpRequest) -> Response:
    wanted = read_query(http, RequestsWanted)
    context = context_of(http)
    view = view_of(http)
    running = running_requests(context.registry, view)
    return as_json({"running": running, "ended": view.ended(context.metrics.ended, wanted.limit)})


@router.get("/v1/status/stream")
@describe(
    "server",
    "The status every second, after the last ten minutes in figures",
    media=SSE,
    stream=SSE,
    event=StatusEvent,
    statuses=(429,),
)
async def status_stream(http: HttpRequest) -> Response:
    feed = context_of(http).feed
    feed.listen()
    return EventStream(
        feed.events(view_of(http)), feed.leave, lambda e: event("error", openai_error(e))
    )


@router.get("/v1/logs/stream")
@describe(
    "server",
    "The last lines of the server's log, and those that come",
    media=SSE,
    stream=SSE,
    event=LogLine,
    query=LinesWanted,
    statuses=(400, 429),
)
async def log_stream(http: HttpRequest) -> Response:
    wanted = read_query(http, LinesWanted)
    context = context_of(http)
    lines = context.log_lines
    lines.listen()
    level = logging.getLevelNamesMapping()[wanted.level.upper()]
    events = lines.events(level, wanted.tail, context.config.keep_alive)
    return EventStream(events, lines.leave, lambda e: event("error", openai_error(e)))
