"""From a /generate body to the requests of its prompts: batches spread out, every field placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.api.body import refuse, unknown
from millrace.api.generate.schema import (
    DEFAULT_TOKENS,
    KNOWN_SAMPLING,
    REFUSED_SAMPLING,
    GenerateRequest,
    SamplingParams,
)
from millrace.errors import BadRequest
from millrace.serving.adapters import ServedAdapter
from millrace.serving.batches import PromptCount, prompts_in
from millrace.serving.model import ServedModel
from millrace.serving.pictures import RawPrompt
from millrace.serving.request import Request, check_tokens
from millrace.serving.sampling_fields import fill, sampling_fields
from millrace.text.conversation import ImagePart
from millrace.text.grammar import demand_of

T = TypeVar("T")
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Sampling fields by SGLang's names."""
_HERE = {"stop": "sampling_params.stop"}


@dataclass(frozen=True)
class PromptRequest:
    """One prompt of the batch, and what is to be told of it."""

    request: Request
    scored: bool
    """Whether logprobs are told."""
    start: int
    """The first prompt token whose logprob is told; the prompt's length for none."""


def check(raw: Mapping[str, Any]) -> list[str]:
    """Refuse parameters that cannot be honoured; returns those that nobody here has heard of."""
    names: list[str] = []
    given = raw.get("sampling_params") or {}
    for params in given if isinstance(given, list) else [given]:
        refuse(params, REFUSED_SAMPLING)
        names += [f"sampling_params.{n}" for n in unknown(params, KNOWN_SAMPLING)]
    return list(dict.fromkeys(names))


def count_of(wire: GenerateRequest) -> PromptCount:
    param = "input_ids" if wire.text is None else "text"
    prompts = prompts_in(wire.text if wire.text is not None else wire.input_ids)
    params = wire.sampling_params
    if isinstance(params, list):  # one each: another number of them is refused when they are read
        answers = sum((p.n if p.n is not None else 1) for p in params)
    else:
        answers = prompts * ((params.n if params else None) or 1)
    return PromptCount(prompts, param, answers)


def read_prompts(
    wire: GenerateRequest, model: ServedModel
) -> tuple[list[list[int]], bool, list[list[ImagePart]]]:
    """The prompts in tokens, whether they came as a batch, and the pictures of each."""
    tokens, is_batch = _prompts(wire, model)
    return tokens, is_batch, _pictures(wire, len(tokens), is_batch)


def _prompts(wire: GenerateRequest, model: ServedModel) -> tuple[list[list[int]], bool]:
    """The prompts in tokens, and whether they came as a batch."""
    if (wire.text is None) == (wire.input_ids is None):
        raise BadRequest("Give exactly one of 'text' and 'input_ids'.", param="text")
    if isinstance(wire.text, str):
        return [model.text_prompt(wire.text)], False
    if wire.text is not None:
        if not wire.text:
            raise BadRequest("'text' is an empty list.", param="text")
        return model.text_prompts(wire.text), True
    given = wire.input_ids or []
    single_prompt = [i for i in given if isinstance(i, int)]
    batch = [p for p in given if isinstance(p, list)]
    if not given or (single_prompt and batch):
        raise BadRequest(
            "'input_ids' must be a list of token ids, or a list of such lists.", param="input_ids"
        )
    for ids in batch or [single_prompt]:
        check_tokens("input_ids", ids, model.width)
    return (batch, True) if batch else ([single_prompt], False)


def _pictures(wire: GenerateRequest, count: int, is_batch: bool) -> list[list[ImagePart]]:
    """The pictures of each prompt."""
    given = wire.image_data
    if not given:
        return [[] for _ in range(count)]
    rows: list[Any] = given if is_batch and isinstance(given, list) else [given]
    if len(rows) != count:
        raise BadRequest(
            f"'image_data' must be a list of pictures for each of the {count} prompts.",
            param="image_data",
        )
    return [_parts(row) for row in rows]


def _parts(row: str | list[Any]) -> list[ImagePart]:
    sources = [row] if isinstance(row, str) else row
    if not all(isinstance(source, str) for source in sources):
        raise BadRequest("'image_data' of one prompt is a list of texts.", param="image_data")
    return [ImagePart(source, where="image_data") for source in sources]


def prompt_requests(
    wire: GenerateRequest, model: ServedModel, prompts: list[RawPrompt], ids: list[str]
) -> list[PromptRequest]:
    count = len(prompts)
    params = _spread(wire.sampling_params, count, "sampling_params", SamplingParams())
    scored = _spread(wire.return_logprob, count, "return_logprob", False)
    starts = _spread(wire.logprob_start_len, count, "logprob_start_len", -1)
    tops = _spread(wire.top_logprobs_num, count, "top_logprobs_num", 0)
    salts = _spread(wire.cache_salt, count, "cache_salt", "")
    keys = _spread(wire.extra_key, count, "extra_key", "")
    adapters = _spread(wire.lora_path, count, "lora_path", None)
    found = []
    for i, raw in enumerate(prompts):
        prompt = raw.tokens
        request = _request(ids[i], prompt, params[i], model)
        request.media, request.pictures = raw.media, raw.pictures
        request.priority = wire.priority or 0
        request.timeout = wire.timeout
        wire.apply(request)
        if name := adapters[i]:
            request.adapter = _adapter(model, name)
        request.cache_salt = f"{salts[i]}\0{keys[i]}" if keys[i] else salts[i]
        start = len(prompt) if starts[i] < 0 else starts[i]
        if start > len(prompt):
            raise BadRequest(
                f"logprob_start_len is {start}, and the prompt has {len(prompt)} tokens.",
                param="logprob_start_len",
            )
        if scored[i]:
            request.logprobs = tops[i]
            request.prompt_logprobs = tops[i] if start < len(prompt) else None
        request.only_prompt = request.max_tokens == 0
        if request.only_prompt and not scored[i]:
            raise BadRequest(
                "max_new_tokens: 0 makes nothing; it is for scoring a prompt, with "
                "return_logprob: true and a logprob_start_len.",
                param="sampling_params.max_new_tokens",
            )
        found.append(PromptRequest(request, scored[i], start))
    return found


def _adapter(model: ServedModel, name: str) -> ServedAdapter:
    adapter = model.client.adapters.list.get(name)
    if adapter is None:
        raise BadRequest(
            f"lora_path: no adapter '{name}' is loaded for '{model.base}'.", param="lora_path"
        )
    return adapter


def _spread(value: T | list[T] | None, count: int, name: str, missing: T) -> list[T]:
    """One value per prompt."""
    if not isinstance(value, list):
        return [missing if value is None else value] * count
    if len(value) != count:
        raise BadRequest(
            f"'{name}' has {len(value)} entries for {count} prompts; give one value, or one each.",
            param=name,
        )
    return value


def _request(id: str, prompt: list[int], wire: SamplingParams, model: ServedModel) -> Request:
    if wire.max_new_tokens is not None and (wire.min_new_tokens or 0) > wire.max_new_tokens:
        raise BadRequest(
            f"min_new_tokens is {wire.min_new_tokens}, more than max_new_tokens, "
            f"{wire.max_new_tokens}.",
            param="sampling_params.min_new_tokens",
        )
    demand = demand_of(
        {"json_schema": wire.json_schema, "regex": wire.regex, "ebnf": wire.ebnf},
    )
    request = Request(id=id, prompt=prompt, grammar=model.form(demand))
    fill(request, sampling_fields(wire, **_NAMES), model, _HERE)
    request.default_tokens = DEFAULT_TOKENS
    if wire.max_new_tokens is None:
        request.max_tokens = None
    return request
