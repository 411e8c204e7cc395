"""Sampling and headers as every protocol fills them: the request's wishes over the model's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.protocol import Sampling
from millrace.serving.model import ServedModel
from millrace.serving.request import SamplingRanges

_TOKEN = re.compile(r"[0-9]{1,10}")
_LONGEST = 2000
"""Characters of a header that names what was ignored."""


def sampling_of(
    asked: Mapping[str, Any], model: ServedModel, bias: Mapping[str, float] | None = None
) -> Sampling:
    """`asked` holds fields of Sampling by name; what is missing or None is left to the model."""
    wishes = {k: v for k, v in asked.items() if v is not None}
    defaults = {k: v for k, v in model.defaults.items() if _in_range(k, v)}
    values: dict[str, Any] = {"temperature": 1.0} | defaults | wishes
    if bias:
        values["logit_bias"] = _bias(bias, model.width)
    return Sampling(**values)


def _in_range(name: str, value: Any) -> bool:
    """A model's authors may recommend what is no range of ours; their users are not to blame."""
    try:
        msgspec.convert({name: value}, SamplingRanges)
    except msgspec.ValidationError:
        return False
    return True


def _bias(wire: Mapping[str, float], size: int) -> dict[int, float]:
    for key in wire:
        if not _TOKEN.fullmatch(key) or int(key) >= size:
            raise BadRequest(
                f"logit_bias: '{key[:20]}' is not a token id of this model (0 to {size - 1}).",
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
