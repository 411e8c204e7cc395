"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.context import request_id
from millrace.api.encode.running import inputs_of, loaded, run, spelled
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border
from millrace.serving.batches import PromptCount, prompts_in
from millrace.serving.ranges import Positive
from millrace.text.inputs import Cut

router = APIRouter()


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    """True if left out."""
    dimensions: Positive | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None
    """Nothing in it concerns embeddings."""


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


_EMBED = Border(
    OllamaEmbedRequest,
    encodes=True,
    prompts=lambda wire: PromptCount(prompts_in(wire.input), "input"),
)
_EMBEDDINGS = Border(OllamaEmbeddingsRequest, encodes=True)


@router.post("/api/embed")
@describe("ollama", "Texts to vectors", body=OllamaEmbedRequest, statuses=RUNS)
async def embed(http: HttpRequest) -> Response:
    start = time.monotonic_ns()
    asked = await _EMBED.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_vectors()
    await loaded(http, asked.model)
    began = time.monotonic_ns()
    id = request_id(http, "ollama-")
    dimensions = encodings.check_dimensions(wire.dimensions)
    body: dict[str, Any] = {"model": wire.model or asked.model.name, "embeddings": []}
    given = [wire.input] if isinstance(wire.input, str) and wire.input else wire.input or []
    if given:
        cut: Cut = "none" if wire.truncate is False else "right"
        prompt = encodings.prompt()
        inputs = await asyncio.to_thread(inputs_of, encodings, given, cut=cut, prompt=prompt)
        found = await run(http, encodings, id, inputs, normalize=True, dimensions=dimensions)
        body["embeddings"] = await spelled(found.encoded)
        body["prompt_eval_count"] = found.tokens
    body |= {"total_duration": time.monotonic_ns() - start, "load_duration": began - start}
    return as_json(body, asked.headers(id))


@router.post("/api/embeddings")
@describe("ollama", "One text to a vector", body=OllamaEmbeddingsRequest, statuses=RUNS)
async def embeddings(http: HttpRequest) -> Response:
    asked = await _EMBEDDINGS.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_vectors()
    await loaded(http, asked.model)
    id = request_id(http, "ollama-")
    if not wire.prompt:
        return as_json({"embedding": []}, asked.headers(id))
    prompt = encodings.prompt()
    inputs = await asyncio.to_thread(
        inputs_of, encodings, wire.prompt, cut="right", prompt=prompt, param="prompt"
    )
    found = await run(http, encodings, id, inputs)
    (vector,) = await spelled(found.encoded)
    return as_json({"embedding": vector}, asked.headers(id))
