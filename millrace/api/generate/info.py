"""SGLang's questions about the server, and its two orders: abort a request, drop the cache."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from millrace.api.answer import as_json
from millrace.api.body import convert, read_object
from millrace.api.callers import viewer_of
from millrace.api.context import context_of
from millrace.api.leases import all_loaded, leased
from millrace.api.openapi.describe import READS, describe
from millrace.api.origins import check_changing_get
from millrace.errors import BadRequest, NotFound
from millrace.models.window import read_config
from millrace.serving.model import ServedModel
from millrace.version import __version__

router = APIRouter()


class ModelSelection(msgspec.Struct):
    model: str | None = None
    """The only one there is, if left out."""


@router.get("/get_model_info")
@router.get("/model_info")
@describe("sglang", "What the model is", query=ModelSelection, statuses=(404,))
async def model_info(http: HttpRequest) -> Response:
    return as_json(_about(await leased(http, http.query_params.get("model"), loads=False)))


@router.get("/get_server_info")
@router.get("/server_info")
@describe("sglang", "What the server is and does", query=ModelSelection, statuses=(404,))
async def server_info(http: HttpRequest) -> Response:
    model = await leased(http, http.query_params.get("model"), loads=False)
    client = model.client
    return as_json(
        _about(model)
        | {
            "version": __version__,
            "status": client.state.value,
            "context_length": model.window,
            "max_running_requests": client.admission.max_running,
            "max_queued_requests": client.admission.max_queue,
            "device": client.ready.device if client.ready else None,
            "dtype": client.ready.dtype if client.ready else None,
            "num_running_requests": sum(
                r.first_token is not None for r in client.in_flight.values()
            ),
            "num_waiting_requests": sum(r.first_token is None for r in client.in_flight.values()),
        }
    )


def _about(model: ServedModel) -> dict[str, Any]:
    folder = model.tokenizer.folder
    config = read_config(folder)
    return {
        "model_path": str(folder),
        "tokenizer_path": str(folder),
        "served_model_name": model.name,
        "is_generation": not model.is_encoder,
        "preferred_sampling_params": model.defaults or None,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "max_context_length": model.window,
        "vocab_size": len(model.tokenizer.vocabulary),
        "eos_token_ids": sorted(model.tokenizer.eos_ids),
        "has_image_understanding": model.pictures.taken,
        "has_audio_understanding": False,
    }


class AbortRequest(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False
    """All of the caller's own key; for administrators, all that run."""


@router.post("/abort_request")
@describe("sglang", "Abort a request", body=AbortRequest, statuses=(404, *READS))
async def abort_request(http: HttpRequest) -> Response:
    context = context_of(http)
    wire = convert(await read_object(http, context.config.max_body), AbortRequest)
    viewer = viewer_of(http)
    clients = [m.client for m in context.registry.all()]
    if wire.abort_all:
        found = [
            c.cancel_all([r for r in c.in_flight.values() if r.visible_to(viewer)]) for c in clients
        ]
        return as_json({"aborted": sum(found)})
    if not wire.rid:
        raise BadRequest("Give the 'rid' of the request, or abort_all: true.", param="rid")
    aborted = sum(c.cancel(wire.rid, viewer) for c in clients)
    if not aborted:
        raise NotFound(f"No request with the id '{wire.rid}' is running.", param="rid")
    return as_json({"rid": wire.rid, "aborted": aborted})


@router.get("/flush_cache")
@describe("sglang", "Drop the prefix cache", media="text/plain", statuses=(403, 405))
async def flush_cache_by_get(http: HttpRequest) -> Response:
    """As SGLang has it, with a key or from this server's own page alone: any page can send a GET."""
    check_changing_get(http, context_of(http).config.cors_origins)
    return await flush_cache(http)


@router.post("/flush_cache")
@describe("sglang", "Drop the prefix cache", media="text/plain")
async def flush_cache(http: HttpRequest) -> Response:
    reports = [await m.client.cache(clear=True) for m in all_loaded(http)]
    is_there = any(r.enabled for r in reports)
    return PlainTextResponse("Cache flushed." if is_there else "There is no cache to flush.")
