"""POST /rerank, /v1/rerank and /v2/rerank: Cohere's, Jina's and vLLM's words, or TEI's; and /score."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.context import request_id
from millrace.api.encode.answers import RerankAnswer, ScoreAnswer, TeiRank
from millrace.api.encode.running import Found, limit_of, loaded, run, way_of
from millrace.api.encode.schema import ADVISORY, REFUSED, EncodeCommon, RerankRequest, ScoreRequest
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border
from millrace.errors import BadRequest
from millrace.serving.batches import PromptCount, prompts_in
from millrace.serving.encodings import Encodings
from millrace.text.inputs import Cut, Inputs

router = APIRouter()


def _documents(wire: RerankRequest) -> PromptCount:
    if wire.documents is None:
        return PromptCount(prompts_in(wire.texts), "texts")
    return PromptCount(prompts_in(wire.documents), "documents")


def _pairs(wire: ScoreRequest) -> PromptCount:
    """As many as the longer side has: the other has as many, or one that goes with each."""
    sides = {name: prompts_in(getattr(wire, name)) for names in _SIDES for name in names}
    longest = max(sides, key=sides.__getitem__)
    return PromptCount(sides[longest], longest)


_SIDES = (("text_1", "queries"), ("text_2", "documents"))
"""The two texts of a score, each under either name."""
_RERANK = Border(RerankRequest, REFUSED, ADVISORY, encodes=True, prompts=_documents)
_SCORE = Border(ScoreRequest, REFUSED, ADVISORY, encodes=True, prompts=_pairs)
_ONLY_TEI = ("return_text", "raw_scores", "truncate", "truncation_direction")
_NOT_TEI = ("top_n", "return_documents", "max_tokens_per_doc", "truncate_prompt_tokens")


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
@describe(
    "rerank",
    "Sort documents by how well they answer a query",
    body=RerankRequest,
    answer=RerankAnswer | list[TeiRank],
    statuses=RUNS,
)
async def rerank(http: HttpRequest) -> Response:
    asked = await _RERANK.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_scores()
    texts, is_tei = _texts(wire)
    await loaded(http, asked.model)
    id = request_id(http, "rerank-")
    limit, cut = _limit(wire, encodings, is_tei)
    queries = [wire.query] * len(texts)
    read = functools.partial(
        encodings.pairs,
        queries,
        texts,
        cut=cut,
        limit=limit,
        document_limit=wire.max_tokens_per_doc,
        instruction=wire.instruction,
        param="texts" if is_tei else "documents",
    )
    found = await _paired(http, encodings, id, read, wire)
    scores = encodings.scores(found.encoded, queries, raw=bool(wire.raw_scores))
    order = sorted(range(len(texts)), key=lambda n: -scores[n])
    if is_tei:
        ranks: list[dict[str, Any]] = [{"index": n, "score": scores[n]} for n in order]
        if wire.return_text:
            ranks = [r | {"text": texts[n]} for r, n in zip(ranks, order, strict=True)]
        return as_json(ranks, asked.headers(id))
    results: list[dict[str, Any]] = [{"index": n, "relevance_score": scores[n]} for n in order]
    if wire.return_documents:
        results = [
            r | {"document": {"text": texts[n]}} for r, n in zip(results, order, strict=True)
        ]
    body = {
        "id": id,
        "model": asked.model.name,
        "results": results[: wire.top_n or len(results)],
        "usage": found.usage,
        # Cohere's clients look here for what it cost.
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": found.tokens},
        },
    }
    return as_json(body, asked.headers(id))


def _texts(wire: RerankRequest) -> tuple[list[str], bool]:
    """The documents, and whether they came in TEI's words."""
    if (wire.documents is None) == (wire.texts is None):
        raise BadRequest("Give either 'documents' or 'texts'.", param="documents")
    is_tei = wire.documents is None
    foreign = _NOT_TEI if is_tei else _ONLY_TEI
    for name in foreign:
        if getattr(wire, name) is not None:
            raise BadRequest(
                f"'{name}' does not go with '{'texts' if is_tei else 'documents'}'.", param=name
            )
    given = wire.texts if is_tei else wire.documents
    texts = [d if isinstance(d, str) else d.text for d in given or []]
    param = "texts" if is_tei else "documents"
    if not texts:
        raise BadRequest(f"'{param}' is an empty list.", param=param)
    return texts, is_tei


async def _paired(
    http: HttpRequest,
    encodings: Encodings,
    id: str,
    read: Callable[[], Inputs],
    common: EncodeCommon,
) -> Found:
    """Queries and documents read off the event loop, and run."""
    inputs = await asyncio.to_thread(read)
    kind = encodings.scoring
    return await run(http, encodings, id, inputs, kind, normalize=True, common=common)


def _limit(wire: RerankRequest, encodings: Encodings, is_tei: bool) -> tuple[int, Cut]:
    """TEI refuses what is too long unless told otherwise; everybody else's rerank cuts it."""
    if is_tei:
        return encodings.length, way_of(wire.truncate, wire.truncation_direction)
    limit, _ = limit_of(encodings, wire.truncate_prompt_tokens)
    return limit, "right"


@router.post("/v1/score")
@router.post("/score")
@describe(
    "vllm", "How well texts go together", body=ScoreRequest, answer=ScoreAnswer, statuses=RUNS
)
async def score(http: HttpRequest) -> Response:
    asked = await _SCORE.read(http)
    wire, encodings = asked.wire, asked.model.encodings
    encodings.need_scores()
    queries, documents = _matched(wire)
    await loaded(http, asked.model)
    id = request_id(http, "score-")
    limit, cut = limit_of(encodings, wire.truncate_prompt_tokens)
    read = functools.partial(
        encodings.pairs,
        queries,
        documents,
        cut=cut,
        limit=limit,
        instruction=wire.instruction,
        param="text_2",
    )
    found = await _paired(http, encodings, id, read, wire)
    scores = encodings.scores(found.encoded, queries)
    body = {
        "id": id,
        "object": "list",
        "created": int(time.time()),
        "model": asked.model.name,
        "data": [{"index": n, "object": "score", "score": s} for n, s in enumerate(scores)],
        "usage": found.usage,
    }
    return as_json(body, asked.headers(id))


def _matched(wire: ScoreRequest) -> tuple[list[str], list[str]]:
    """One with one, one with each of many, or each with its own."""
    sides: list[list[str]] = []
    for name, also in _SIDES:
        given, same = getattr(wire, name), getattr(wire, also)
        if (given is None) == (same is None):
            raise BadRequest(f"Give '{name}', or '{also}' in its place.", param=name)
        value = given if given is not None else same
        texts = [value] if isinstance(value, str) else list(value)
        if not texts:
            raise BadRequest(f"'{name}' is an empty list.", param=name)
        sides.append(texts)
    first, second = sides
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise BadRequest(
            f"'text_1' has {len(first)} texts and 'text_2' {len(second)}: it must be one with any "
            f"number, or as many.",
            param="text_1",
        )
    return first, second
