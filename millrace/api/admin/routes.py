"""The server about itself: GET /, /health, /metrics and /v1/status, and cancelling requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.admin.answers import Cancellation, Health, Root, Status
from millrace.api.admin.status import ranks_of, status_of
from millrace.api.admin.viewing import view_of
from millrace.api.answer import as_json
from millrace.api.callers import viewer_of
from millrace.api.context import context_of
from millrace.api.openapi.describe import describe
from millrace.api.web import pages
from millrace.errors import NotFound
from millrace.serving.keeper import State
from millrace.version import __version__

router = APIRouter()


@router.get("/")
@describe("server", "Whether anybody is there; to browsers, the page", answer=Root)
async def root(http: HttpRequest) -> Response:
    """Some clients ask this first, to see whether anybody is there."""
    if pages.wants_html(http.headers.get("accept", "")):
        response = pages.as_html("index.html")
    else:
        links = {"docs": "/docs", "models": "/v1/models"}
        response = as_json({"name": "millrace", "version": __version__, "links": links})
    response.headers["vary"] = "Accept"
    response.headers["cache-control"] = "no-cache"
    return response


@router.get("/health")
@describe("server", "Whether the models are ready", answer=Health, alike=(503,))
async def health(http: HttpRequest) -> Response:
    registry = context_of(http).registry
    instances = [i for i in registry.instances() if i.phase in ("wished", "loading", "loaded")]
    lost = {i.spec.name: i for i in registry.unavailable()}
    states = {name: str(State.FAILED) for name in lost}
    states |= {i.spec.name: i.client.state.value for i in instances}
    # A model that is loaded on demand is no trouble of the server's.
    counted = [i for i in instances if i.phase == "loaded" or i.at_start]
    worst = next((s for s in _WORST_FIRST if s in [i.client.state for i in counted]), State.READY)
    reasons = [why for i in counted if (why := i.client.why) is not None]
    if lost and all(spec.name in lost for spec in registry.named):
        # While others are served, a lost one is no trouble of theirs.
        worst = State.FAILED
        reasons += [i.failure.message for i in lost.values() if i.failure is not None]
    body: dict[str, Any] = {"status": str(worst), "models": states}
    if reasons:
        body["error"] = reasons[0]
    split = {
        i.spec.name: [r["state"] for r in ranks] for i in instances if (ranks := ranks_of(i.client))
    }
    if split:
        body["ranks"] = split
    response = as_json(body)
    response.status_code = 200 if worst is State.READY else 503
    return response


_WORST_FIRST = (
    State.FAILED,
    State.STOPPED,
    State.STARTING,
    State.RESTARTING,
    State.STALLED,
)


@router.get("/metrics")
@describe("server", "Counters and timings for Prometheus", media="text/plain")
async def metrics(http: HttpRequest) -> Response:
    text = context_of(http).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/v1/requests/{id}/cancel")
@router.delete("/v1/requests/{id}")
@describe(
    "server",
    "Cancel a request of the caller's by its id; administrators, any",
    answer=Cancellation,
    statuses=(404,),
)
async def cancel(http: HttpRequest, id: str) -> Response:
    viewer = viewer_of(http)
    models = context_of(http).registry.all()
    if not sum(m.client.cancel(id, viewer) for m in models):
        raise NotFound(f"No request with the id '{id}' is running.", param="id")
    return as_json({"id": id, "cancelled": True})


@router.get("/v1/status")
@describe("server", "Models and running requests", answer=Status)
async def status(http: HttpRequest) -> Response:
    return as_json(status_of(context_of(http).registry, view_of(http)))
