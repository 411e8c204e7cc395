"""Embeddings and relevance, of models that make them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from millrace.errors import BadRequest, Unsupported
from millrace.protocol import Encoded, EncodingKind
from millrace.rpc.localai import wire
from millrace.rpc.localai.asking import refuse_media
from millrace.serving.batches import PromptCount, check_count
from millrace.serving.dispatch import Origin
from millrace.serving.encodings import Encodings, numbers
from millrace.serving.model import ServedModel
from millrace.text.inputs import Inputs


async def embed(message: Any, model: ServedModel, origin: Origin) -> Any:
    refuse_media(message)
    if message.Images:
        raise Unsupported("'Images': pictures have no embeddings here.", param="Images")
    _check_task(model, "embeddings", "make embeddings")
    encodings = model.encodings
    encodings.need_vectors()

    def read() -> Inputs:
        if message.EmbeddingTokens:
            return encodings.tokens([list(message.EmbeddingTokens)])
        text = message.Embeddings or message.Prompt
        if not text:
            raise BadRequest("There is no text to embed: give 'Embeddings'.", param="Embeddings")
        return encodings.texts([text], prompt=encodings.prompt(), param="Embeddings")

    found, tokens = await _run(encodings, read, "vectors", origin)
    vector = numbers(found[0])
    return wire.EmbeddingResult(
        embeddings=vector,
        tokens=1,
        dim=len(vector),
        prompt_tokens=tokens,
        layout=wire.FINAL_EMBEDDING,
    )


def _check_task(model: ServedModel, setting: str, task: str) -> None:
    """Raise that a model which makes text was not loaded for something else, in LocalAI's own words."""
    if not model.is_encoder:
        raise BadRequest(
            f"The model '{model.name}' was loaded to make text. Set '{setting}: true' in its "
            f"configuration to load it to {task}.",
            param="model",
        )


async def rerank(message: Any, model: ServedModel, origin: Origin) -> Any:
    _check_task(model, "reranking", "judge relevance")
    encodings = model.encodings
    encodings.need_scores()
    documents = list(message.documents)
    if not documents:
        raise BadRequest("'documents' is an empty list.", param="documents")
    check_count(PromptCount(len(documents), "documents"))
    if message.top_n < 0:
        raise BadRequest("'top_n' is negative.", param="top_n")
    queries = [message.query] * len(documents)
    found, tokens = await _run(
        encodings,
        lambda: encodings.pairs(queries, documents),
        encodings.scoring,
        origin,
        normalize=True,
    )
    scores = encodings.scores(found, queries)
    order = sorted(range(len(documents)), key=lambda n: -scores[n])
    answer = wire.RerankResult(usage=wire.Usage(total_tokens=tokens, prompt_tokens=tokens))
    for n in order[: message.top_n or len(order)]:
        answer.results.add(index=n, text=documents[n], relevance_score=scores[n])
    return answer


async def _run(
    encodings: Encodings,
    read: Callable[[], Inputs],
    kind: EncodingKind,
    origin: Origin,
    *,
    normalize: bool | None = None,
) -> tuple[list[Encoded], int]:
    inputs = await asyncio.to_thread(read)
    running = encodings.run(
        f"localai-{secrets.token_hex(12)}",
        inputs,
        kind,
        normalize=normalize,
        endpoint=origin.endpoint,
    )
    try:
        return await running.found(), inputs.count
    finally:
        running.close()
