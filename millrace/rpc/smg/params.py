"""From a gateway's sampling parameters to our request: which of its fields is which field.

Both engines' messages have the same fields where they have a field at all; what one lacks was not
asked for. In proto3 a number that was left out is 0, and means what leaving it out means.
"""

from __future__ import annotations

from typing import Any

from millrace.errors import BadRequest, Unsupported
from millrace.serving.model import ServedModel
from millrace.serving.request import Request, check_tokens
from millrace.serving.sampling_fields import SamplingFields, fill
from millrace.text.grammar import Demand

_TRANSFERS = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
_HERE = {"stop": "sampling_params.stop"}
_FORMS: dict[str, Any] = {
    "json_schema": "schema",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural",
}


def request_of(wire: Any, id: str, model: ServedModel) -> Request:
    """Tokenises and compiles grammars: not for the event loop."""
    _refuse(wire)
    params = wire.sampling_params
    request = Request(id=id, prompt=_cut(_prompt(wire, model), params, model))
    request.grammar = model.form(_demand(params))
    fill(request, _sampling_fields(params), model, _HERE)
    request.logprobs = _alternatives(params, "logprobs")
    request.prompt_logprobs = _alternatives(params, "prompt_logprobs")
    if request.max_tokens == 0:
        request.only_prompt = True
        if request.prompt_logprobs is None:
            raise BadRequest(
                "max_tokens: 0 makes nothing; it is for scoring a prompt, with prompt_logprobs.",
                param="max_tokens",
            )
    elif request.max_tokens is not None and request.sampling.min_tokens > request.max_tokens:
        raise BadRequest(
            f"min_tokens is {request.sampling.min_tokens}, more than max_tokens, "
            f"{request.max_tokens}.",
            param="min_tokens",
        )
    return request


def prompt_ids(tokenized: Any, model: ServedModel) -> list[int]:
    ids = list(tokenized.input_ids)
    if not ids:
        raise BadRequest("tokenized.input_ids is empty.", param="input_ids")
    check_tokens("input_ids", ids, model.width)
    return ids


def _prompt(wire: Any, model: ServedModel) -> list[int]:
    match wire.WhichOneof("input"):
        case "tokenized":
            return prompt_ids(wire.tokenized, model)
        case "text":
            if not wire.text:
                raise BadRequest("text is empty.", param="text")
            return model.text_prompt(wire.text)
    raise BadRequest("The request has neither tokenized input nor a text.", param="input")


def _refuse(wire: Any) -> None:
    """What would change the answer and cannot be honoured."""
    fields = {field.name for field, _ in wire.ListFields()}
    for name in _TRANSFERS:
        if name in fields:
            raise Unsupported(f"'{name}' is not supported by this worker.", param=name)
    if "extra_mm_inputs" in fields:
        raise Unsupported("'extra_mm_inputs' is not supported by this worker.", param="mm_inputs")
    if "data_parallel_rank" in fields and wire.data_parallel_rank != 0:
        raise BadRequest(
            f"data_parallel_rank is {wire.data_parallel_rank}; this worker has rank 0 alone.",
            param="data_parallel_rank",
        )


def _cut(prompt: list[int], params: Any, model: ServedModel) -> list[int]:
    """The prompt's end, where the request says how much of it counts."""
    if not _has(params, "truncate_prompt_tokens"):
        return prompt
    most = params.truncate_prompt_tokens
    if most == -1:
        return prompt[-(model.window - 1) :]
    if most < 1:
        raise BadRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for what the model takes.",
            param="truncate_prompt_tokens",
        )
    return prompt[-most:]


def _sampling_fields(params: Any) -> SamplingFields:
    def said(name: str) -> Any:
        """A field that the message has and that is not 0."""
        return getattr(params, name, None) or None

    return SamplingFields(
        temperature=params.temperature if _has(params, "temperature") else None,
        top_p=said("top_p"),
        top_k=said("top_k"),
        min_p=said("min_p"),
        repetition_penalty=said("repetition_penalty"),
        presence_penalty=said("presence_penalty"),
        frequency_penalty=said("frequency_penalty"),
        min_tokens=said("min_tokens"),
        logit_bias={str(token): bias for token, bias in params.logit_bias.items()},
        seed=params.seed if _has(params, "seed") else None,
        n=said("n"),
        max_tokens=params.max_tokens if _has(params, "max_tokens") else None,
        stop=list(getattr(params, "stop", ())),
        stop_token_ids=list(params.stop_token_ids),
        include_stop_str_in_output=said("include_stop_str_in_output"),
        skip_special_tokens=getattr(params, "skip_special_tokens", True),
        ignore_eos=params.ignore_eos,
    )


def _alternatives(params: Any, name: str) -> int | None:
    if not _has(params, name):
        return None
    count: int = getattr(params, name)
    if count < 0:
        raise BadRequest(f"{name} must be 0 to 100, not {count}.", param=name)
    return count


def _demand(params: Any) -> Demand | None:
    """The form that the answer must have."""
    if "constraint" not in params.DESCRIPTOR.oneofs_by_name:
        return None
    name = params.WhichOneof("constraint")
    match name:
        case None:
            return None
        case "json_object":
            schema = {"type": "object"}
            return Demand("schema", schema, name) if params.json_object else None
        case "choice":
            return Demand("choice", list(params.choice.choices), name)
    return Demand(_FORMS[name], getattr(params, name), name)


def _has(params: Any, name: str) -> bool:
    """Whether an optional field is there; of a message without the field it is not."""
    return name in params.DESCRIPTOR.fields_by_name and params.HasField(name)
