"""What /generate answers with, as it is described."""

from __future__ import annotations

from typing import Any

import msgspec

ScoredToken = tuple[float | None, int, str | None]
"""A logprob, which the first token of a prompt has none of, the token's id, and its text if asked for."""


class MetaInfo(msgspec.Struct):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    matched_stop: str | int | None
    input_token_logprobs: list[ScoredToken] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[ScoredToken] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[ScoredToken] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[ScoredToken]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GeneratedSoFar(Generated):
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Which answer it is, where there are several."""


GenerateAnswer = Generated | list[Generated]
"""A list where there are several prompts, or several answers to one."""
