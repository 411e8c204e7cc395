"""POST /v1/embeddings, and /embed as Text Embeddings Inference has it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.context import request_id
from millrace.api.encode.answers import EmbeddingAnswer
from millrace.api.encode.running import (
    input_count,
    inputs_of,
    limit_of,
    loaded,
    run,
    spelled,
    way_of,
)
from millrace.api.encode.schema import ADVISORY, REFUSED, EmbeddingRequest, TeiEmbedRequest
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border
from millrace.serving.batches import PromptCount, prompts_in

router = APIRouter()
_EMBEDDINGS = Border(EmbeddingRequest, REFUSED, ADVISORY, encodes=True, prompts=input_count)
_TEI = Border(
    TeiEmbedRequest,
    REFUSED,
    ADVISORY,
    encodes=True,
    prompts=lambda wire: PromptCount(prompts_in(wire.inputs), "inputs"),
)


@router.post("/v1/embeddings")
@describe(
    "openai",
    "Texts to vectors",
    body=EmbeddingRequest,
    answer=EmbeddingAnswer,
    statuses=RUNS,
)
async def embeddings(http: HttpRequest) -> Response:
    asked = await _EMBEDDINGS.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_vectors()
    await loaded(http, asked.model)
    id = request_id(http, "embd-")
    dimensions = encodings.check_dimensions(wire.dimensions)

    limit, cut = limit_of(encodings, wire.truncate_prompt_tokens, wire.truncate)
    inputs = await asyncio.to_thread(
        lambda: inputs_of(
            encodings,
            wire.input,
            cut=cut,
            limit=limit,
            prompt=encodings.prompt(wire.prompt_name, wire.input_type),
            special=wire.add_special_tokens,
        )
    )
    found = await run(
        http,
        encodings,
        id,
        inputs,
        normalize=wire.normalize,
        dimensions=dimensions,
        common=wire,
    )
    vectors = await spelled(found.encoded, as_base64=wire.encoding_format == "base64")
    body = {
        "object": "list",
        "id": id,
        "data": [
            {"object": "embedding", "index": number, "embedding": vector}
            for number, vector in enumerate(vectors)
        ],
        "model": asked.model.name,
        "usage": found.usage,
    }
    return as_json(body, asked.headers(id))


@router.post("/embed")
@describe("tei", "Texts to vectors", body=TeiEmbedRequest, answer=list[list[float]], statuses=RUNS)
async def embed(http: HttpRequest) -> Response:
    asked = await _TEI.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_vectors()
    await loaded(http, asked.model)
    id = request_id(http, "embd-")
    dimensions = encodings.check_dimensions(wire.dimensions)
    way = way_of(wire.truncate, wire.truncation_direction)
    inputs = await asyncio.to_thread(
        lambda: inputs_of(
            encodings,
            wire.inputs,
            cut=way,
            prompt=encodings.prompt(wire.prompt_name),
            param="inputs",
        )
    )
    normalize = True if wire.normalize is None else wire.normalize
    found = await run(http, encodings, id, inputs, normalize=normalize, dimensions=dimensions)
    return as_json(await spelled(found.encoded), asked.headers(id))
