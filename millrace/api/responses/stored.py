"""Stored responses by their id: get or follow, delete, cancel, and the items they were given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json
from millrace.api.context import context_of
from millrace.api.openapi.describe import SSE, describe
from millrace.api.responses.answers import (
    Deleted,
    Following,
    ItemList,
    Paging,
    ResponseEvent,
    ResponseObject,
)
from millrace.api.responses.jobs import replay
from millrace.api.responses.owners import owned
from millrace.api.responses.paging import number, page
from millrace.api.responses.sections import Section
from millrace.errors import BadRequest, NotFound

router = APIRouter(dependencies=[Depends(owned)])


@router.get("/v1/responses/{id}")
@describe(
    "responses",
    "A stored response, or its events",
    answer=ResponseObject,
    stream=SSE,
    event=ResponseEvent,
    query=Following,
    statuses=(400, 404),
)
async def get(http: HttpRequest, id: str) -> Response:
    if http.query_params.get("stream", "false").lower() in ("true", "1"):
        return await _follow(http, id)
    return as_json(await _response(http, id))


async def _follow(http: HttpRequest, id: str) -> Response:
    context = context_of(http)
    start = number(http, "starting_after", -1) + 1
    if start < 0:
        raise BadRequest("starting_after cannot be below -1.", param="starting_after")
    if job := context.jobs.get(id):
        events = job.follow(start, context.config.keep_alive)
    else:
        await context.store.response(id)
        kept = await context.store.events(id)
        if kept is None:
            raise BadRequest(
                f"The response '{id}' was not made in the background, so it cannot be followed.",
                param="stream",
            )
        events = _all(await asyncio.to_thread(replay, kept, start))
    return EventStream(events, lambda: None, lambda error: b"")


async def _all(events: Iterable[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


async def _response(http: HttpRequest, id: str) -> dict[str, Any]:
    context = context_of(http)
    job = context.jobs.get(id)
    return job.response() if job else await context.store.response(id)


@router.delete("/v1/responses/{id}")
@describe("responses", "Delete a stored response", answer=Deleted, statuses=(404, 503, 507))
async def delete(http: HttpRequest, id: str) -> Response:
    context = context_of(http)
    if job := context.jobs.get(id):
        await job.cancel()
    held = context.jobs.forget(id)
    if not held and not await context.store.delete(id):
        raise _missing(id)
    return as_json({"id": id, "object": "response", "deleted": True})


@router.post("/v1/responses/{id}/cancel")
@describe("responses", "Cancel a background response", answer=ResponseObject, statuses=(400, 404))
async def cancel(http: HttpRequest, id: str) -> Response:
    context = context_of(http)
    if job := context.jobs.get(id):
        await job.cancel()
        return as_json(job.response())
    found = await context.store.response(id)
    if not found["background"]:
        raise BadRequest(
            f"The response '{id}' was not made in the background, so it cannot be cancelled.",
            param="response_id",
        )
    return as_json(found)


@router.get("/v1/responses/{id}/input_items")
@describe(
    "responses",
    "What a response was given",
    answer=ItemList,
    query=Paging,
    statuses=(400, 404),
)
async def input_items(http: HttpRequest, id: str) -> Response:
    """All that the response was given, what it goes back to included."""
    store = context_of(http).store
    found = await store.head(id) if store.on else None
    if found is None:
        raise _missing(id)
    before = found.body["previous_response_id"]
    earlier = await store.chain(before) if before else []
    return as_json(await page(http, store, [*earlier, Section(id, "input")]))


def _missing(id: str) -> NotFound:
    return NotFound(f"There is no response '{id}' here.", param="response_id")
