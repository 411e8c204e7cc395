"""Sampling and headers as every protocol fills them: the request's wishes over the model's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.errors import BadRequest
from millrace.protocol import Sampling
from millrace.serving.model import ServedModel

_SEED_BITS = (1 << 63) - 1
_LONGEST = 2000
"""Characters of a header that names what was ignored."""


def sampling_of(
    asked: Mapping[str, Any], model: ServedModel, bias: Mapping[str, float] | None = None
) -> Sampling:
    """`asked` holds fields of Sampling by name; what is missing or None is left to the model."""
    wishes = {k: v for k, v in asked.items() if v is not None}
    values: dict[str, Any] = {"temperature": 1.0} | model.defaults | wishes
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if bias:
        values["logit_bias"] = _bias(bias, len(model.tokenizer.vocabulary))
    return Sampling(**values)


def seed_of(value: int | None) -> int | None:
    return None if value is None else value & _SEED_BITS


def _bias(wire: Mapping[str, float], size: int) -> dict[int, float]:
    for key in wire:
        if not key.isdecimal() or int(key) >= size:
            raise BadRequest(
                f"logit_bias: '{key}' is not a token id of this model (0 to {size - 1}).",
                param="logit_bias",
            )
    return {int(k): v for k, v in wire.items()}


def ignored_header(names: list[str]) -> dict[str, str]:
    """What was left out of the request, said in the response.

    Names may be the client's own, so they are made fit for a header.
    """
    if not names:
        return {}
    plain = (n.encode("unicode_escape").decode("ascii") for n in dict.fromkeys(names))
    text = ", ".join(plain)
    return {"x-millrace-ignored": text if len(text) <= _LONGEST else text[:_LONGEST] + "..."}
