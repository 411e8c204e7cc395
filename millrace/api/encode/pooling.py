"""POST /classify and /pooling, as vLLM has them."""

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
from millrace.api.encode.answers import ClassifyAnswer, PoolingAnswer
from millrace.api.encode.running import (
    Found,
    input_count,
    inputs_of,
    limit_of,
    loaded,
    run,
    spelled,
    spelled_rows,
)
from millrace.api.encode.schema import (
    ADVISORY,
    REFUSED,
    ClassifyRequest,
    InputFields,
    PoolingRequest,
)
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border
from millrace.errors import BadRequest
from millrace.protocol import Encoded
from millrace.serving.encodings import Encodings, numbers
from millrace.text.inputs import Inputs

router = APIRouter()
_CLASSIFY = Border(ClassifyRequest, REFUSED, ADVISORY, encodes=True, prompts=input_count)
_POOLING = Border(PoolingRequest, REFUSED, ADVISORY, encodes=True, prompts=input_count)
_MOST_STATES = 256 << 20
"""Bytes of vectors, one per token, that one request may ask for."""


async def _read(wire: InputFields, encodings: Encodings, prompt: str = "") -> Inputs:
    limit, cut = limit_of(encodings, wire.truncate_prompt_tokens, wire.truncate)
    return await asyncio.to_thread(
        lambda: inputs_of(
            encodings,
            wire.input,
            cut=cut,
            limit=limit,
            prompt=prompt,
            special=wire.add_special_tokens,
        )
    )


@router.post("/v1/classify")
@router.post("/classify")
@describe(
    "vllm", "Which label a text has", body=ClassifyRequest, answer=ClassifyAnswer, statuses=RUNS
)
async def classify(http: HttpRequest) -> Response:
    asked = await _CLASSIFY.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_labels()
    await loaded(http, asked.model)
    id = request_id(http, "classify-")
    inputs = await _read(wire, encodings)
    found = await run(http, encodings, id, inputs, "logits", common=wire)
    data = [_classified(n, e, encodings, wire) for n, e in enumerate(found.encoded)]
    return as_json(_listed(id, asked.model.name, data, found), asked.headers(id))


def _classified(
    number: int, encoded: Encoded, encodings: Encodings, wire: ClassifyRequest
) -> dict[str, Any]:
    labels = encodings.facts.labels
    values = _values(encoded, encodings, wire.use_activation)
    best = max(range(len(values)), key=values.__getitem__)
    return {
        "index": number,
        "label": labels[best],
        "probs": values,
        "num_classes": len(values),
    }


def _values(encoded: Encoded, encodings: Encodings, activated: bool | None) -> list[float]:
    return numbers(encoded) if activated is False else encodings.probabilities(encoded)


@router.post("/v1/pooling")
@router.post("/pooling")
@describe(
    "vllm", "What a model makes of texts", body=PoolingRequest, answer=PoolingAnswer, statuses=RUNS
)
async def pooling(http: HttpRequest) -> Response:
    asked = await _POOLING.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    task = wire.task or ("classify" if encodings.facts.kind == "classify" else "embed")
    await loaded(http, asked.model)
    id = request_id(http, "pool-")
    if task == "classify":
        encodings.need_labels()
        inputs = await _read(wire, encodings)
        found = await run(http, encodings, id, inputs, "logits", common=wire)
        rows = [_values(e, encodings, wire.use_activation) for e in found.encoded]
        numbers_of = [msgspec.Raw(msgspec.json.encode(r)) for r in rows]
    else:
        encodings.need_vectors()
        numbers_of, found = await _vectors(http, wire, encodings, id, each=task == "token_embed")
    data: list[Any] = [
        {"index": n, "object": "pooling", "data": value} for n, value in enumerate(numbers_of)
    ]
    return as_json(_listed(id, asked.model.name, data, found), asked.headers(id))


async def _vectors(
    http: HttpRequest, wire: PoolingRequest, encodings: Encodings, id: str, *, each: bool
) -> tuple[list[msgspec.Raw], Found]:
    """A vector per text, or one for each of its tokens."""
    dimensions = encodings.check_dimensions(wire.dimensions)
    inputs = await _read(wire, encodings, encodings.prompt(wire.prompt_name, wire.input_type))
    if each and inputs.count * encodings.width * 4 > _MOST_STATES:
        raise BadRequest(
            f"{inputs.count} tokens with a vector each are more than one request may ask for; send "
            f"fewer texts.",
            param="input",
        )
    found = await run(
        http,
        encodings,
        id,
        inputs,
        "states" if each else "vectors",
        normalize=bool(wire.normalize) if each else wire.normalize,
        dimensions=dimensions,
        common=wire,
    )
    as_base64 = wire.encoding_format == "base64"
    spell = spelled_rows if each else spelled
    return await spell(found.encoded, as_base64=as_base64), found


def _listed(id: str, model: str, data: list[dict[str, Any]], found: Found) -> dict[str, Any]:
    return {
        "id": id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": found.usage,
    }
