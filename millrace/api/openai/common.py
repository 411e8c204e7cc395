"""What chat and completions do alike: sampling, usage, logprobs on the wire, headers."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.api.openai.schema import OpenAICommon
from millrace.api.sampling import sampling_of
from millrace.protocol import Sampling, TokenLogprob
from millrace.serving.model import ServedModel
from millrace.serving.request import Request, seed_of
from millrace.text.deltas import Usage
from millrace.text.grammar import Demand, demand_of
from millrace.text.stops import parse_stops
from millrace.text.vocabulary import Vocabulary

_PLAIN = tuple(f for f in Sampling.__struct_fields__ if f != "logit_bias")


def fill(request: Request, wire: OpenAICommon, model: ServedModel) -> None:
    """The part of a Request that both endpoints fill alike."""
    asked = {name: getattr(wire, name) for name in _PLAIN}
    request.sampling = sampling_of(asked, model, wire.logit_bias)
    request.seed = seed_of(wire.seed)
    request.n = wire.n or 1
    request.max_tokens = wire.max_tokens
    request.stops = parse_stops(wire.stop)
    request.include_stop = bool(wire.include_stop_str_in_output)
    request.stop_in_reasoning = bool(wire.stop_in_reasoning)
    request.stop_token_ids = wire.stop_token_ids or []
    request.skip_special_tokens = wire.skip_special_tokens
    request.ignore_eos = bool(wire.ignore_eos)
    request.priority = wire.priority or 0
    request.timeout = wire.timeout
    request.cache_salt = wire.cache_salt or ""


def demanded(wire: OpenAICommon) -> Demand | None:
    """The form that the answer must have, from whichever field asks for one."""
    names = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return demand_of({k: v for k in names if (v := getattr(wire, k)) is not None})


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def wants_usage(wire: OpenAICommon) -> bool:
    return wire.stream_options is not None and wire.stream_options.include_usage


class TokenEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


def token_entry(vocabulary: Vocabulary, token: int, logprob: float) -> TokenEntry:
    raw = vocabulary.bytes_of(token)
    return TokenEntry(raw.decode("utf-8", "replace"), logprob, list(raw))


def chat_logprobs(vocabulary: Vocabulary, items: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` as chat has it."""
    content = []
    for item in items:
        entry = msgspec.structs.asdict(token_entry(vocabulary, item.token, item.logprob))
        entry["top_logprobs"] = [token_entry(vocabulary, t, v) for t, v in item.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def token_name(vocabulary: Vocabulary, token: int) -> str:
    """A token as completions name it; one that is no text by itself is told apart by its bytes."""
    raw = vocabulary.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


class CompletionLogprobs:
    """`choices[].logprobs` as completions have it; offsets run on over the pieces of a stream."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0

    def first(self, token: int) -> dict[str, Any]:
        """The prompt's first token, which nothing comes before."""
        name = token_name(self._vocabulary, token)
        value = {
            "tokens": [name],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._offset += len(name)
        return value

    def add(self, items: list[TokenLogprob]) -> dict[str, Any]:
        names = [token_name(self._vocabulary, i.token) for i in items]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [i.logprob for i in items],
            "top_logprobs": [
                {token_name(self._vocabulary, t): v for t, v in i.top} if i.top else None
                for i in items
            ],
            "text_offset": offsets,
        }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several stretches of completion logprobs as one."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {k: [v for part in parts for v in part[k]] for k in keys}
