"""The server about itself: GET /, /health, /metrics and /v1/status, and cancelling requests."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.admin.answers import Cancellation, Health, Root, Status
from millrace.api.answer import as_json
from millrace.api.context import context_of
from millrace.api.moments import moment
from millrace.api.openapi.describe import describe
from millrace.errors import NotFound
from millrace.serving.active import Active
from millrace.serving.adapters import ServedAdapter
from millrace.serving.client import EngineClient
from millrace.serving.instance import Instance
from millrace.serving.keeper import State
from millrace.version import __version__

router = APIRouter()


@router.api_route("/", methods=["GET", "HEAD"])
@describe("server", "Whether anybody is there", answer=Root)
async def root() -> Response:
    """Some clients ask this first, to see whether anybody is there."""
    links = {"docs": "/docs", "models": "/v1/models"}
    return as_json({"name": "millrace", "version": __version__, "links": links})


@router.get("/health")
@describe("server", "Whether the models are ready", answer=Health, alike=(503,))
async def health(http: HttpRequest) -> Response:
    registry = context_of(http).registry
    instances = [i for i in registry.instances() if i.phase in ("wished", "loading", "loaded")]
    states = {i.spec.name: i.client.state.value for i in instances}
    # A model that is loaded on demand is no trouble of the server's.
    counted = [i for i in instances if i.phase == "loaded" or i.at_start]
    worst = next((s for s in _WORST_FIRST if s in [i.client.state for i in counted]), State.READY)
    body: dict[str, Any] = {"status": str(worst), "models": states}
    reasons = [why for i in counted if (why := i.client.why) is not None]
    if reasons:
        body["error"] = reasons[0]
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
@describe("server", "Cancel a request by its id", answer=Cancellation, statuses=(404,))
async def cancel(http: HttpRequest, id: str) -> Response:
    models = context_of(http).registry.all()
    if not any(m.client.cancel(id) for m in models):
        raise NotFound(f"No request with the id '{id}' is running.", param="id")
    return as_json({"id": id, "cancelled": True})


@router.get("/v1/status")
@describe("server", "Models and running requests", answer=Status)
async def status(http: HttpRequest) -> Response:
    registry = context_of(http).registry
    found = [i for i in registry.instances() if i.phase != "text"]
    memory = {"limit": registry.limit, "reserved": registry.reserved}
    return as_json({"version": __version__, "memory": memory, "models": [_model(i) for i in found]})


def _model(instance: Instance) -> dict[str, Any]:
    client, ready = instance.client, instance.client.ready
    return {
        "name": instance.spec.name,
        "state": client.state.value,
        "stage": client.stage,
        "residency": instance.phase,
        "pinned": instance.pinned,
        "expires_at": moment(instance.expires),
        "reserved_bytes": instance.reserved,
        "leases": instance.leases,
        "engine_pid": client.pid,
        "restarts": client.restarts,
        "context_window": instance.model.window if instance.model else None,
        "device": ready.device if ready else None,
        "dtype": ready.dtype if ready else None,
        "weight_bytes": ready.weight_bytes if ready else None,
        "load_seconds": ready.load_seconds if ready else None,
        "kv_budget": ready.kv_budget if ready else None,
        "kv_bytes_per_token": ready.kv_bytes_per_token if ready else None,
        "device_memory": _memory(client),
        "adapters": [_adapter(a, client) for a in client.adapters.list.all()],
        "adapter_bytes": client.adapters.nbytes,
        "totals": asdict(client.totals),
        "requests": [_request(r) for r in client.in_flight.values()],
    }


def _adapter(adapter: ServedAdapter, client: EngineClient) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "path": adapter.path,
        "loaded": client.adapters.is_loaded(adapter),
        "rank": adapter.rank,
        "modules": adapter.modules,
        "requests": client.adapters.running(adapter),
        "error": adapter.problem,
    }


def _memory(client: EngineClient) -> dict[str, int] | None:
    memory, ready = client.memory, client.ready
    if memory is None or ready is None:
        return None
    return msgspec.structs.asdict(memory) | {"total": ready.device_bytes}


def _request(active: Active) -> dict[str, Any]:
    now = time.monotonic()
    first = active.first_token
    generated, prompt = active.tokens_generated, active.prompt_tokens
    return {
        "id": active.id,
        "phase": active.phase,
        "prompt_tokens": prompt,
        "cached_tokens": active.cached,
        "cache_hit": active.hit,
        "prefilled_tokens": prompt if first else min(prompt, active.prefilled),
        "progress": 1.0 if first else round(min(1.0, active.prefilled / max(1, prompt)), 3),
        "made_tokens": generated,
        "max_tokens": active.max_tokens,
        "age_seconds": round(now - active.arrived, 3),
        "ttft_seconds": round(first - active.arrived, 3) if first else None,
        "tokens_per_second": (
            round((generated - 1) / (now - first), 2)
            if first and generated > 1 and now > first
            else None
        ),
        "resumes": active.deaths,
        "priority": active.priority,
        "endpoint": active.endpoint,
    }
