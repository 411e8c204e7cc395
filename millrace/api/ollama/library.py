"""Ollama's library: which models there are, what each is, and which are loaded."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.body import convert, read_object
from millrace.api.context import context_of
from millrace.api.leases import leased
from millrace.api.moments import moment
from millrace.api.ollama.names import tagged
from millrace.api.openapi.describe import READS, describe
from millrace.errors import BadRequest, ModelError, Unsupported
from millrace.models import store
from millrace.models.window import read_config
from millrace.serving.adapters import ServedAdapter
from millrace.serving.model import ServedModel
from millrace.serving.pictures import takes_pictures
from millrace.version import __version__

router = APIRouter()

SPEAKS = "0.12.11"
"""The version of Ollama whose API this is; clients ask for it to know what they may send."""
_FOR_EVER = "9999-12-31T23:59:59Z"


class OllamaModelName(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    """The older spelling."""

    @property
    def asked(self) -> str:
        if not (self.model or self.name):
            raise BadRequest("Say which model: 'model' is missing.", param="model")
        return self.model or self.name or ""


@router.get("/api/version")
@describe("ollama", "Which version of the API is spoken")
async def version() -> Response:
    return as_json({"version": SPEAKS, "millrace": __version__})


@router.get("/api/tags")
@describe("ollama", "The models that are served")
async def tags(http: HttpRequest) -> Response:
    """Whatever can be asked for, loaded or not."""
    registry = context_of(http).registry
    specs = [s.spec for s in await registry.standings()]
    found = await asyncio.to_thread(lambda: [_listed(s.name, s.folder) for s in specs])
    listed: list[dict[str, Any]] = []
    for spec, entry in zip(specs, found, strict=True):
        if entry is not None:
            listed.append(entry)
            listed += [_adapted(entry, a) for a in registry.adapters.of(spec.name).all()]
    return as_json({"models": listed})


def _adapted(entry: dict[str, Any], adapter: ServedAdapter) -> dict[str, Any]:
    """An adapter's entry: its model's, under its own name."""
    own = f"{entry['digest']}\0{adapter.name}\0{adapter.digest}"
    return entry | {
        "name": tagged(adapter.name),
        "model": tagged(adapter.name),
        "digest": hashlib.sha256(own.encode()).hexdigest(),
        "details": entry["details"] | {"parent_model": entry["name"]},
    }


@router.get("/api/ps")
@describe("ollama", "The models that are loaded")
async def ps(http: HttpRequest) -> Response:
    found = []
    for instance in context_of(http).registry.instances():
        ready, model = instance.client.ready, instance.model
        if instance.phase != "loaded" or ready is None or model is None:
            continue
        entry = await asyncio.to_thread(_listed, model.name, model.tokenizer.folder)
        if entry is not None:
            del entry["modified_at"]
            size, on_gpu = ready.weight_bytes, ready.device != "cpu"
            entry |= {"size": size, "size_vram": size if on_gpu else 0}
            expiry = {"expires_at": moment(instance.expires) or _FOR_EVER}
            found.append(entry | expiry | {"context_length": model.window})
    return as_json({"models": found})


@router.post("/api/show")
@describe("ollama", "What a model is", body=OllamaModelName, statuses=(404, *READS))
async def show(http: HttpRequest) -> Response:
    context = context_of(http)
    name = convert(await read_object(http, context.config.max_body), OllamaModelName).asked
    model = await leased(http, name, loads=False)
    return as_json(await asyncio.to_thread(_shown, model))


@router.post("/api/create")
@router.post("/api/copy")
@router.post("/api/push")
@router.post("/api/blobs/{digest}")
@router.head("/api/blobs/{digest}")
@describe("ollama", "Refused by name", needs_body=False, statuses=(400,))
async def not_here(http: HttpRequest) -> Response:
    raise Unsupported(
        f"{http.scope['route'].path} is not supported: models are made and named with the "
        "millrace command, and are not pushed anywhere."
    )


@dataclass(frozen=True)
class _About:
    description: store.ModelDescription
    digest: str
    modified: str


def _about(folder: Path) -> _About:
    return _read(folder, (folder / "config.json").stat().st_mtime)


@functools.lru_cache(maxsize=64)
def _read(folder: Path, modified: float) -> _About:
    """The digest tells folders apart by their configuration and their files' names and sizes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(f"\0{file.name}\0{os.path.getsize(file)}".encode())
    moment = datetime.fromtimestamp(modified, UTC).isoformat().replace("+00:00", "Z")
    return _About(store.describe(folder), digest.hexdigest(), moment)


def _listed(name: str, folder: Path) -> dict[str, Any] | None:
    """None for one that is not whole any more."""
    try:
        about = _about(folder)
    except (OSError, ModelError):
        return None
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": about.modified,
        "size": about.description.bytes,
        "digest": about.digest,
        "details": _details(about.description),
    }


def _details(about: store.ModelDescription) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": about.architecture,
        "families": [about.architecture],
        "parameter_size": _size(about.parameters),
        "quantization_level": about.quantization or about.dtype,
    }


def _size(parameters: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= scale:
            return f"{parameters / scale:.1f}{unit}"
    return str(parameters)


_INFO = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Ollama's words for what a config.json holds."""


def _shown(model: ServedModel) -> dict[str, Any]:
    tokenizer = model.tokenizer
    folder = tokenizer.folder
    about = _about(folder)
    config = read_config(folder)
    config |= config.get("text_config") or {}
    kind = about.description.architecture
    info: dict[str, Any] = {
        "general.architecture": kind,
        "general.parameter_count": about.description.parameters,
    }
    info |= {f"{kind}.{ours}": config[key] for ours, key in _INFO.items() if key in config}
    info[f"{kind}.context_length"] = model.window
    return {
        "modelfile": _modelfile(model),
        "parameters": "\n".join(f"{name} {value}" for name, value in model.defaults.items()),
        "template": tokenizer.template_source or "",
        "details": _details(about.description),
        "model_info": info,
        "capabilities": _capabilities(model, takes_pictures(folder)),
        "modified_at": about.modified,
    }


def _modelfile(model: ServedModel) -> str:
    lines = f"FROM {model.base}\n"
    if model.adapter is not None:
        lines += f"ADAPTER {model.adapter.path}\n"
    return lines


def _capabilities(model: ServedModel, sees: bool) -> list[str]:
    if model.is_encoder:
        return ["embedding"]
    found = ["completion", "vision"] if sees else ["completion"]
    dialect = model.dialect
    if model.tokenizer.template_source is not None:
        found.append("tools")
        if dialect.format.thought is not None or dialect.format.messages is not None:
            found.append("thinking")
    return found
