"""What LocalAI's users write under `options` and `engine_args` of a model, read and checked.

Options are texts of the form `key:value`, as LocalAI's own backends read them. Engine arguments are
JSON with the names of `millrace serve`'s options; a name that nobody knows is an error there.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from millrace.config import EngineConfig, Weights
from millrace.errors import BadRequest
from millrace.serving.request import in_range, seed_of

log = logging.getLogger("millrace.rpc")
Value = bool | int | float | str

_SAMPLING = {
    "max_tokens": "max_tokens",
    "temp": "temperature",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "xtc_threshold": "xtc_threshold",
    "xtc_probability": "xtc_probability",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "loop_guard": "loop_guard",
}
"""Options that win over a request, and the sampling fields that they set."""
_NEUTRAL = ("pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Tokens that have no part in making text here."""
_KNOWN = frozenset(
    (
        *_SAMPLING,
        *_NEUTRAL,
        *("trust_remote_code", "eos_token", "bos_token", "max_cache_entries", "max_kv_size"),
        *("hostfile", "distributed_backend", "tool_parser", "reasoning_parser"),
    )
)


def read_options(entries: Iterable[str]) -> dict[str, Value]:
    """What was said last of each key; an entry without a colon says nothing."""
    found: dict[str, Value] = {}
    for entry in entries:
        key, colon, value = entry.partition(":")
        if colon:
            found[key.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class BackendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a model that is to be loaded."""

    overrides: dict[str, Value] = {}
    """What every request gets, whatever it says, by the names of its sampling fields."""
    trust_remote_code: bool = False
    end: str | None = None
    """The text of a token that ends an answer, beside the model's own."""
    begin: str | None = None
    """The text that the model's template is to begin with."""
    cache: bool = True
    window: int | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    hostfile: str = ""
    distributed_backend: str = ""


def options_of(entries: Iterable[str]) -> BackendOptions:
    """The options, each held to what it may be; those of other backends are named in the log."""
    given = read_options(entries)
    if unknown := sorted(set(given) - _KNOWN):
        log.warning("options without a meaning here: %s", ", ".join(unknown))
    entries_kept = _whole(given, "max_cache_entries", least=0)
    return BackendOptions(
        overrides={
            field: _sampling(key, field, given[key])
            for key, field in _SAMPLING.items()
            if key in given
        },
        trust_remote_code=_switch(given, "trust_remote_code"),
        end=_text(given, "eos_token") or None,
        begin=_text(given, "bos_token") or None,
        cache=entries_kept != 0,
        window=_whole(given, "max_kv_size", least=1),
        tool_format=_text(given, "tool_parser") or None,
        reasoning_format=_text(given, "reasoning_parser") or None,
        hostfile=_text(given, "hostfile"),
        distributed_backend=_text(given, "distributed_backend"),
    )


def _sampling(key: str, field: str, value: Value) -> Value:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if field == "seed":
        if whole:
            seed_of(value)  # type: ignore[arg-type]
            return value
    elif field == "loop_guard":
        if isinstance(value, bool):
            return value
    elif field == "max_tokens":
        if whole and isinstance(value, int) and value >= 1:
            return value
    elif isinstance(value, float) and not math.isfinite(value):
        pass
    elif not isinstance(value, str | bool) and in_range(field, value):
        return value
    raise BadRequest(f"the option '{key}:{value}' is out of range (docs/api.md has the ranges)")


def _switch(given: dict[str, Value], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise BadRequest(f"the option '{key}:{value}' must be true or false")
    return value


def _whole(given: dict[str, Value], key: str, least: int) -> int | None:
    if key not in given:
        return None
    value = given[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadRequest(f"the option '{key}:{value}' must be a whole number from {least} on")
    return value


def _text(given: dict[str, Value], key: str) -> str:
    return str(given.get(key, ""))


Bytes = int | str
"""A number, or a text like 8G."""


class EngineArgs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `engine_args` may say: the options of `millrace serve` that one model has."""

    context: int | None = None
    weights: Weights | None = None
    max_running: int | None = None
    max_queue: Annotated[int, Meta(ge=0)] | None = None
    memory: Bytes | None = None
    kv_memory: Bytes | None = None
    max_stall: float | None = None
    prefill_chunk: int | None = None
    speculate: int | None = None
    cache: bool | None = None
    cache_memory: Bytes | None = None
    cache_disk: Bytes | None = None
    cache_dir: str | None = None
    cache_quant: bool | None = None
    checkpoint_every: int | None = None
    pooling: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    strip_volatile: tuple[str, ...] | None = None
    template_arguments: dict[str, Any] = {}
    specprefill_draft: str | None = None
    specprefill: bool | None = None
    specprefill_threshold: int | None = None
    specprefill_keep_pct: float | None = None

    @property
    def engine(self) -> dict[str, Any]:
        """What of it an engine's configuration takes as it is."""
        names = set(EngineConfig.__struct_fields__) & set(self.__struct_fields__)
        names -= {"kv_memory", "cache_memory", "cache_disk", "specprefill"}
        return {n: value for n in names if (value := getattr(self, n)) is not None}


def engine_args_of(text: str) -> EngineArgs:
    if not text.strip():
        return EngineArgs()
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"engine_args is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadRequest("engine_args must be an object of names and values")
    given = {str(key).replace("-", "_"): value for key, value in raw.items()}
    known = EngineArgs.__struct_fields__
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
            raise BadRequest(f"engine_args: nobody knows the key '{key[:100]}'; {hint}")
    try:
        return msgspec.convert(given, EngineArgs)
    except msgspec.ValidationError as error:
        raise BadRequest(f"engine_args: {error}") from None
