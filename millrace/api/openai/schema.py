"""The wire types of OpenAI's requests, and the line between honoured, refused and advisory fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[int, Meta(ge=1)]
Token = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Common(msgspec.Struct, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    seed: int | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop_token_ids: list[Token] | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None


class ChatRequest(Common):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None


class CompletionRequest(Common):
    prompt: str | list[Any]


ADVISORY = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Fields that only label or advise: accepted, whatever they say."""

REFUSED_BY_BOTH: dict[str, tuple[Any, ...]] = {
    "stop": ([], ""),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "best_of": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "typical_p": (1, 1.0),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
}

REFUSED_BY_CHAT = REFUSED_BY_BOTH | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template_kwargs": ({},),
    "enable_thinking": (),
    "thinking_token_budget": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

REFUSED_BY_COMPLETIONS = REFUSED_BY_BOTH | {
    "logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
}


def known(type: type[msgspec.Struct], refused: dict[str, tuple[Any, ...]]) -> frozenset[str]:
    return frozenset(type.__struct_fields__) | ADVISORY | frozenset(refused)
