"""Ollama's library: which models there are, what each is, and which are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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
from millrace.api.ollama.names import tagged
from millrace.api.openapi.describe import READS, describe
from millrace.api.timestamps import moment
from millrace.errors import BadRequest, ModelError, Unsupported
from millrace.models import description
from millrace.models.description import ModelDescription, inspect, stamp
from millrace.models.files import MOST_JSON, read_bytes, reads_folder
from millrace.models.window import read_config
from millrace.serving.adapters import ServedAdapter
from millrace.serving.memory import memory_of
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
    standings = await registry.standings()
    found = await asyncio.to_thread(
        lambda: [_listed(s.spec.folder, s.spec.name) for s in standings]
    )
    listed: list[dict[str, Any]] = []
    for standing, entry in zip(standings, found, strict=True):
        if (error := standing.facts.error) is not None:
            entry["error"] = error
        listed.append(entry)
        listed += [_adapted(entry, a) for a in registry.adapters.of(standing.spec.name).all()]
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
        entry = await asyncio.to_thread(_listed, model.tokenizer.folder, model.name)
        del entry["modified_at"]
        memory, on_gpu = memory_of(instance), ready.device != "cpu"
        # Ollama counts what a model takes in memory: weights and context. Here, of the context, what is
        # in use; what it may come to is the ceiling, for which Ollama has no field.
        size = memory.weights + memory.kv_in_use
        entry |= {"size": size, "size_vram": size if on_gpu else 0, "memory": memory}
        expiry = {"expires_at": moment(instance.expires) or _FOR_EVER}
        found.append(entry | expiry | {"context_length": model.window})
    return as_json({"models": found})


@router.post("/api/show")
@describe("ollama", "What a model is", body=OllamaModelName, statuses=(404, *READS))
async def show(http: HttpRequest) -> Response:
    context = context_of(http)
    name = convert(await read_object(http, context.config.max_body), OllamaModelName).asked
    model = await leased(http, name, loads=False)
    return as_json(await asyncio.to_thread(_shown, model.tokenizer.folder, model))


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


def _modified(folder: Path) -> str:
    try:
        changed = (folder / "config.json").stat().st_mtime
    except OSError:
        changed = 0.0
    return datetime.fromtimestamp(changed, UTC).isoformat().replace("+00:00", "Z")


def _digest(folder: Path) -> str:
    """It tells folders apart by their configuration and their files' names and sizes."""
    digest = hashlib.sha256()
    with contextlib.suppress(ModelError):
        digest.update(read_bytes(folder / "config.json", MOST_JSON))
    for name, _, size, _ in stamp(folder):
        digest.update(f"\0{name}\0{size}".encode(errors="replace"))
    return digest.hexdigest()


def _listed(folder: Path, name: str) -> dict[str, Any]:
    """Of a broken one, sizes and kinds are unknown."""
    found = inspect(folder)
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _modified(folder),
        "size": found.about.bytes if found.about else 0,
        "digest": _digest(folder),
        "details": _details(found.about),
    }


def _details(about: ModelDescription | None) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": about.architecture if about else "",
        "families": [about.architecture] if about else [],
        "parameter_size": _size(about.parameters) if about else "",
        "quantization_level": (about.quantization or about.dtype) if about else "",
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


@reads_folder
def _shown(folder: Path, model: ServedModel) -> dict[str, Any]:
    about = description.describe(folder)
    tokenizer = model.tokenizer
    config = read_config(folder)
    config |= config.get("text_config") or {}
    kind = about.architecture
    info: dict[str, Any] = {
        "general.architecture": kind,
        "general.parameter_count": about.parameters,
    }
    info |= {f"{kind}.{ours}": config[key] for ours, key in _INFO.items() if key in config}
    info[f"{kind}.context_length"] = model.window
    return {
        "modelfile": _modelfile(model),
        "parameters": "\n".join(f"{name} {value}" for name, value in model.defaults.items()),
        "template": tokenizer.template_source or "",
        "details": _details(about),
        "model_info": info,
        "capabilities": _capabilities(model, takes_pictures(folder)),
        "modified_at": _modified(folder),
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
