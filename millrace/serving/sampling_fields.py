"""The fields that sampling, length and stops of an answer come from, and how they become a Request.

Every protocol has these fields under its own names; an adapter maps its names and does nothing else.
What is left out has the server's default, else the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.protocol import Sampling
from millrace.serving.model import ServedModel
from millrace.serving.request import Request, seed_of
from millrace.text.stops import parse_stops
from millrace.text.tokenizer import Tokenizer

_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")
PLAIN_SAMPLING = tuple(
    f for f in Sampling.__struct_fields__ if f not in ("logit_bias", "bad_words")
)
"""The fields of Sampling that are one number each."""


class SamplingFields(msgspec.Struct, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: Mapping[str, float] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    stop_in_reasoning: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    loop_guard: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    specprefill: bool | None = None
    specprefill_keep_pct: float | None = None


def sampling_fields(wire: Any, **named: str) -> SamplingFields:
    """Those that a wire type has; `named` maps fields to the names that they have there."""
    names = {field: named.get(field, field) for field in SamplingFields.__struct_fields__}
    return SamplingFields(**{field: getattr(wire, name, None) for field, name in names.items()})


def fill(
    request: Request,
    fields: SamplingFields,
    model: ServedModel,
    named: Mapping[str, str] | None = None,
) -> Request:
    """Set these fields of a request; `named` maps fields to the names that errors give them."""
    called = {"stop": "stop", "bad_words": "bad_words"} | dict(named or {})
    asked = {name: getattr(fields, name) for name in PLAIN_SAMPLING}
    values = model.defaults | {name: value for name, value in asked.items() if value is not None}
    request.sampling = Sampling(
        **values,
        logit_bias=_bias(fields.logit_bias or {}, model.width),
        bad_words=_banned(fields.bad_words or [], model.tokenizer, called["bad_words"]),
    )
    request.seed = seed_of(fields.seed)
    request.n = fields.n or 1
    limit = fields.max_tokens
    request.max_tokens = model.default_limit if limit is None else limit
    request.stops = parse_stops(fields.stop, called["stop"])
    request.stop_token_ids = fields.stop_token_ids or []
    request.include_stop = bool(fields.include_stop_str_in_output)
    request.stop_in_reasoning = bool(fields.stop_in_reasoning)
    request.skip_special_tokens = fields.skip_special_tokens is not False
    request.ignore_eos = bool(fields.ignore_eos)
    # A request that wants all its tokens, such as a benchmark's, is not cut by the server's default.
    default = model.default_loop_guard and not request.ignore_eos
    request.loop_guard = default if fields.loop_guard is None else fields.loop_guard
    request.priority = fields.priority or 0
    request.timeout = fields.timeout
    request.cache_salt = fields.cache_salt or ""
    request.specprefill = fields.specprefill
    request.specprefill_keep_pct = fields.specprefill_keep_pct
    return request


def _bias(wire: Mapping[str, float], size: int) -> dict[int, float]:
    for key in wire:
        if not _TOKEN.fullmatch(key) or int(key) >= size:
            raise BadRequest(
                f"logit_bias: '{key[:20]}' is not a token id of this model (0 to {size - 1}).",
                param="logit_bias",
            )
    return {int(k): v for k, v in wire.items()}


def _banned(words: list[str], tokenizer: Tokenizer, param: str) -> list[list[int]]:
    """The tokens of each word, as it is written at the beginning of a text and after a blank."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise BadRequest(f"'{param}' has a word without a letter. Remove it.", param=param)
        for text in (word, f" {word.lstrip()}"):
            found[tuple(tokenizer.encode(text))] = None
    return [list(tokens) for tokens in found]
