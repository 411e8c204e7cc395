"""DELETE /api/delete: a model removed from the server's own store, and from nowhere else.

The Hugging Face cache is shared with other programs and the folders of --model-dir are the operator's:
what lies there is removed on the machine itself.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.body import convert, read_object
from millrace.api.context import context_of
from millrace.api.ollama.library import OllamaModelName
from millrace.api.ollama.names import bare
from millrace.api.openapi.describe import READS, describe
from millrace.errors import BadRequest, ModelNotFound, NotAllowed
from millrace.models import store
from millrace.serving.registry import Registry

router = APIRouter()


@router.delete("/api/delete")
@describe(
    "ollama", "Remove a model from disk", body=OllamaModelName, statuses=(403, 404, *READS, 500)
)
async def delete(http: HttpRequest) -> Response:
    context = context_of(http)
    name = bare(convert(await read_object(http, context.config.max_body), OllamaModelName).asked)
    registry = context.registry
    folder = await _removable(registry, name)
    for instance in registry.instances():
        if _same(instance.spec.folder, folder):
            await registry.unload(instance.spec.name)
    await asyncio.to_thread(store.remove_own, folder)
    return Response(status_code=200)


async def _removable(registry: Registry, name: str) -> Path:
    """The model's folder in millrace's own store; raises why it is not to be removed."""
    if registry.adapters.find(name) is not None:
        raise BadRequest(
            f"'{name}' is an adapter; POST /v1/unload_lora_adapter unloads it.", param="model"
        )
    try:
        spec = await registry.spec(name)
    except ModelNotFound:
        # One that is not whole any more is not served, and can be removed all the same.
        broken = await asyncio.to_thread(store.own_folder, name) if registry.is_open else None
        if broken is None:
            raise
        return broken
    served = [s.folder for s in registry.named]
    served += [Path(s.engine.specprefill.draft) for s in registry.named if s.engine.specprefill]
    if any(_same(spec.folder, other) for other in served):
        raise BadRequest(f"The model '{name}' is being served; it can be removed after that.")
    own = await asyncio.to_thread(store.own_folder, spec.name)
    if own is None or not _same(own, spec.folder):
        raise NotAllowed(
            f"The model '{name}' is not in the server's own store but in a folder that is shared with "
            "other programs, such as the Hugging Face cache. It can be removed on the server's machine "
            f"only: millrace rm {spec.name}, or delete its folder.",
            param="model",
        )
    return own


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
