"""Ollama's `options` and `format` as fields of a Request, and the names of those with no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.api.body import check_fields, refuse, unknown
from millrace.api.ollama.schema import KNOWN_OPTIONS, REFUSED_OPTIONS, OllamaCommon, Options
from millrace.errors import BadRequest
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.serving.sampling_fields import fill, sampling_fields
from millrace.text.grammar import Demand, any_object

_HERE = {"stop": "options.stop", "bad_words": "options.bad_words"}


def check_options(raw: Mapping[str, Any]) -> list[str]:
    """Refuse what cannot be honoured; returns the options that nobody here has heard of."""
    given = raw.get("options") or {}
    check_fields(given, "options", "options")
    refuse(given, REFUSED_OPTIONS)
    return [f"options.{name}" for name in unknown(given, KNOWN_OPTIONS)]


def place(request: Request, wire: OllamaCommon, model: ServedModel) -> list[str]:
    """Place the options; returns the names of those that have no effect here."""
    options = wire.options or Options()
    ignored = []
    fields = sampling_fields(options, repetition_penalty="repeat_penalty")
    if options.repeat_last_n == 0:
        fields.presence_penalty = fields.frequency_penalty = 0.0
        fields.repetition_penalty = 1.0
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
    fields.seed = None if options.seed == -1 else options.seed
    fields.cache_salt = wire.cache_salt
    fields.priority = wire.priority
    fields.timeout = wire.timeout
    fill(request, fields, model, _HERE)
    wire.apply(request)
    if options.num_predict is not None:
        request.max_tokens = options.num_predict if options.num_predict > 0 else None
    request.window = options.num_ctx
    request.logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
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
