"""What chat and completions do alike: sampling, usage, the answer's envelope."""

from __future__ import annotations

from typing import Any

from millrace.api.openai.schema import Common
from millrace.protocol import Sampling
from millrace.serving.model import ServedModel
from millrace.text.deltas import Usage


def sampling_of(wire: Common, model: ServedModel) -> Sampling:
    """The request's sampling over the model's own defaults over the protocol's."""
    asked = {
        k: v
        for k in ("temperature", "top_p", "top_k", "min_p")
        if (v := getattr(wire, k)) is not None
    }
    values: dict[str, Any] = {"temperature": 1.0} | model.defaults | asked
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return Sampling(**values)


def seed_of(wire: Common) -> int | None:
    return None if wire.seed is None else wire.seed & ((1 << 63) - 1)


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def ignored_header(names: list[str]) -> dict[str, str]:
    return {"x-millrace-ignored": ", ".join(names)} if names else {}
