"""Ollama's `options` and `format` as fields of a Request, and the names of those with no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.api.body import refuse, unknown
from millrace.api.ollama.schema import KNOWN_OPTIONS, REFUSED_OPTIONS, OllamaCommon, Options
from millrace.api.sampling import sampling_of
from millrace.errors import BadRequest
from millrace.serving.model import ServedModel
from millrace.serving.request import Request, seed_of
from millrace.text.grammar import Demand, any_object
from millrace.text.stops import parse_stops

_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
)


def check_options(raw: Mapping[str, Any]) -> list[str]:
    """Refuse what cannot be honoured; returns the options that nobody here has heard of."""
    given = raw.get("options") or {}
    refuse(given, REFUSED_OPTIONS)
    return [f"options.{name}" for name in unknown(given, KNOWN_OPTIONS)]


def fill(request: Request, wire: OllamaCommon, model: ServedModel) -> list[str]:
    """Place the options; returns the names of those that have no effect here."""
    options = wire.options or Options()
    ignored = []
    wishes = {name: getattr(options, name) for name in _SAME_NAME}
    wishes["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n == 0:
        wishes |= dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)
        wishes["repetition_penalty"] = 1.0
    elif _narrow(options, model.window) and _penalised(options):
        ignored.append("options.repeat_last_n")
    if options.num_ctx is not None and options.num_ctx > model.window:
        ignored.append("options.num_ctx")
    if options.num_predict == 0:
        raise BadRequest(
            "num_predict is 0: ask for at least one token, or -1 for as many as there is room for.",
            param="options.num_predict",
        )
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    request.sampling = sampling_of(wishes, model)
    request.seed = None if options.seed == -1 else seed_of(options.seed)
    limit = options.num_predict
    request.max_tokens = None if limit is None or limit < 0 else limit
    request.stops = parse_stops(options.stop, "options.stop")
    request.logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    request.cache_salt = wire.cache_salt or ""
    return ignored


def _narrow(options: Options, window: int) -> bool:
    """Whether penalties are asked to look at less than the whole context, which is what ours do."""
    last = options.repeat_last_n
    return last is not None and 0 < last < window and last != options.num_ctx


def _penalised(options: Options) -> bool:
    return (
        options.repeat_penalty not in (None, 1.0)
        or bool(options.presence_penalty)
        or bool(options.frequency_penalty)
    )


def demanded(form: str | dict[str, Any] | None) -> Demand | None:
    """The form that the answer must have."""
    if isinstance(form, dict):
        return Demand("schema", form, "format")
    if form in (None, ""):
        return None
    if form == "json":
        return any_object("format")
    raise BadRequest(f"format is '{form}'; it must be 'json' or a JSON schema.", param="format")
