"""Adapters over HTTP, as vLLM has them: loaded and unloaded while the server runs.

A path of the server's own files comes from a client here: only folders that the operator named are read,
or any where nobody but this machine's users can ask.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from millrace.api.body import convert, read_object
from millrace.api.context import context_of
from millrace.api.leases import leased
from millrace.api.openapi.describe import describe
from millrace.config import MOST_NAME
from millrace.errors import (
    AdapterError,
    AdapterUnreadable,
    BadRequest,
    ModelNotFound,
    NotAllowed,
    NotFound,
)
from millrace.serving.keys import is_loopback
from millrace.serving.model import ServedModel
from millrace.serving.registry import Registry

log = logging.getLogger("millrace.api")
router = APIRouter()

Name = Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadAdapterRequest(msgspec.Struct):
    lora_name: Name
    """What requests then give as `model`."""
    lora_path: AdapterPath
    """A folder on the server's machine, in mlx-lm's form or PEFT's."""
    base_model_name: str | None = None
    """The model it is for; may be left out where there is one."""
    load_inplace: bool = False
    """Whether it takes the place of an adapter of the same name."""


class UnloadAdapterRequest(msgspec.Struct):
    lora_name: Name
    lora_int_id: int | None = None
    """vLLM's number of an adapter; names are enough here."""


@router.post("/v1/load_lora_adapter")
@describe(
    "server",
    "Load an adapter from a folder of the server's",
    body=LoadAdapterRequest,
    media="text/plain",
    statuses=(400, 403, 404, 413, 415, 429, 500, 503, 507),
)
async def load(http: HttpRequest) -> Response:
    wire = convert(await read_object(http, context_of(http).config.max_body), LoadAdapterRequest)
    if not wire.lora_name.isprintable() or not wire.lora_name.strip():
        raise BadRequest("lora_name must have printable characters only.", param="lora_name")
    config = context_of(http).config
    folder = allowed(wire.lora_path, config.adapter_folders, local=is_loopback(config.host))
    model = await _base(http, wire)
    await model.client.settled()
    try:
        await model.client.adapters.load(wire.lora_name, str(folder), in_place=wire.load_inplace)
    except AdapterUnreadable as error:
        raise _unreadable(wire.lora_path, error, config.adapter_folders) from None
    return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
@describe(
    "server",
    "Unload an adapter; requests that run with it end with it",
    body=UnloadAdapterRequest,
    media="text/plain",
    statuses=(400, 404, 413, 415, 429),
)
async def unload(http: HttpRequest) -> Response:
    wire = convert(await read_object(http, context_of(http).config.max_body), UnloadAdapterRequest)
    registry = context_of(http).registry
    if (found := registry.adapters.find(wire.lora_name)) is None:
        raise NotFound(f"There is no adapter '{wire.lora_name}' here.", param="lora_name")
    registry.adapters.of(found[0]).retire(wire.lora_name)
    for model in registry.all():
        model.client.adapters.tidy()
    return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' removed successfully.")


async def _base(http: HttpRequest, wire: LoadAdapterRequest) -> ServedModel:
    """The model that an adapter is for; its name must be no other model's."""
    registry = context_of(http).registry
    if registry.adapters.find(wire.base_model_name) is not None:
        raise BadRequest("base_model_name is an adapter's.", param="base_model_name")
    known = registry.adapters.find(wire.lora_name)
    base = (await registry.spec(wire.base_model_name)).name
    if known[0] != base if known else await _is_model(registry, wire.lora_name):
        raise AdapterError(f"The name '{wire.lora_name}' is taken.", param="lora_name")
    return await leased(http, base, gives="text")


async def _is_model(registry: Registry, name: str) -> bool:
    try:
        await registry.spec(name)
    except ModelNotFound:
        return False
    return True


def allowed(path: str, folders: Sequence[str], *, local: bool) -> Path:
    """The folder that an adapter's path means, if it may be read at all.

    A path outside the operator's folders is refused by its text alone, in the same way whether it exists
    or not.
    """
    if not folders:
        if not local:
            raise NotAllowed(
                "Adapters are loaded over the network only from folders that the server was started "
                "with (--lora-dir)."
            )
        return Path(os.path.abspath(os.path.expanduser(path)))
    for folder in folders:
        if (found := _inside(path, os.path.abspath(os.path.expanduser(folder)))) is not None:
            return found
    raise NotAllowed(f"'{path}' is no adapter in the folders of --lora-dir.", param="lora_path")


def _inside(path: str, folder: str) -> Path | None:
    """The folder that a path means inside this one, after all links are followed; None without any."""
    real = Path(os.path.realpath(folder))
    for root in dict.fromkeys((Path(folder), real)):
        wanted = Path(os.path.normpath(root / path))
        if wanted == root or not wanted.is_relative_to(root):
            continue
        try:
            found = Path(os.path.realpath(wanted))
            if found != real and found.is_relative_to(real) and found.is_dir():
                return found
        except (OSError, ValueError):
            continue
    return None


def _unreadable(path: str, error: AdapterUnreadable, folders: Sequence[str]) -> AdapterError:
    """Why an adapter was not read: in full where the path is in the operator's own folders.

    Elsewhere the reasons would tell which files exist. Debug lines are not in /v1/logs/stream unless the
    operator has chosen that level.
    """
    if folders:
        return AdapterError(error.message, param="lora_path")
    log.debug("no adapter was read: %s", error.message)
    return AdapterError(
        f"There is no adapter at '{path}' that this server can read; with --log-level debug its log has "
        "the reason.",
        param="lora_path",
    )
