"""The wire types of requests for numbers, in every protocol's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from millrace.serving.ranges import MOST, Count, Positive, Priority, Timeout

InputType = Literal[
    "query",
    "document",
    "passage",
    "search_query",
    "search_document",
    "classification",
    "clustering",
]
Truncation = Annotated[int, Meta(ge=-1, le=MOST)]
"""Tokens to which inputs are cut; -1 is as many as the model takes."""
Way = Literal["NONE", "START", "END"]
Encoding = Literal["float", "base64"]


class EncodeCommon(msgspec.Struct, kw_only=True):
    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Priority | None = None
    """Higher goes first."""
    ttl: float | str | None = None
    """How long the model is to stay loaded after this, in seconds or as `5m`; below 0 for ever."""
    timeout: Timeout | None = None
    """Seconds until the request ends with an error."""


class InputFields(EncodeCommon, kw_only=True):
    input: str | list[Any]
    """A text, texts, a list of token ids, or a list of those."""
    truncate: bool | Way | None = None
    """Whether what is too long is cut, and where."""
    add_special_tokens: bool = True
    """Whether texts get what the tokenizer puts around them; token ids are taken as they are."""


class EmbeddingRequest(InputFields, kw_only=True):
    encoding_format: Encoding = "float"
    dimensions: Positive | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    normalize: bool | None = None
    """Whether vectors are made of length 1; as the model has it if left out."""


class ClassifyRequest(InputFields, kw_only=True):
    use_activation: bool | None = None
    """False for the logits as they are."""


class PoolingRequest(InputFields, kw_only=True):
    task: Literal["embed", "classify", "token_embed"] | None = None
    """What the model is for, if left out; `token_embed` is a vector per token."""
    encoding_format: Encoding = "float"
    dimensions: Positive | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None


class ScoreRequest(EncodeCommon, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Another word for `text_1`, as `documents` is for `text_2`."""
    documents: str | list[str] | None = None
    instruction: str | None = None
    """What a decoder is told relevance means."""


class RerankText(msgspec.Struct):
    text: str


class RerankRequest(EncodeCommon, kw_only=True):
    """Cohere's, Jina's and vLLM's, with `documents`; TEI's, with `texts`."""

    query: str
    documents: list[str | RerankText] | None = None
    top_n: Count | None = None
    """How many are answered; 0 is all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None
    instruction: str | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class TeiEmbedRequest(msgspec.Struct, kw_only=True):
    """Text Embeddings Inference's."""

    inputs: str | list[Any]
    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    normalize: bool | None = None
    """True if left out."""
    prompt_name: str | None = None
    dimensions: Positive | None = None
    ttl: float | str | None = None
    """As in `EncodeCommon`, which has nothing else that TEI's clients send."""


REFUSED: dict[str, tuple[Any, ...]] = {
    "messages": ([],),
    "images": ([],),
    "embedding_types": (["float"], None),
    "output_dimension": (),
    "late_chunking": (False,),
    "rank_fields": ([],),
    "mm_processor_kwargs": ({},),
}
ADVISORY = frozenset({"user", "request_id", "cache_salt", "max_chunks_per_doc", "metadata"})
