"""The wire types of answers with numbers."""

from __future__ import annotations

from typing import Literal

import msgspec


class EncodeUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingItem(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""
    object: Literal["embedding"] = "embedding"


class EmbeddingAnswer(msgspec.Struct):
    id: str
    model: str
    data: list[EmbeddingItem]
    usage: EncodeUsage
    object: Literal["list"] = "list"


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    usage: EncodeUsage


class TeiRank(msgspec.Struct):
    index: int
    score: float
    text: str | None = None


class ScoreItem(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: EncodeUsage
    object: Literal["list"] = "list"


class ClassifyItem(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassifyItem]
    usage: EncodeUsage
    object: Literal["list"] = "list"


class PoolingItem(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: EncodeUsage
    object: Literal["list"] = "list"
