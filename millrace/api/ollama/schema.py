"""The wire types of Ollama's requests, and the line between honoured, refused and advisory fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from millrace.api.fields import foreign
from millrace.api.openai.schema import ToolWish
from millrace.api.sampling import OwnFields
from millrace.serving.ranges import (
    MOST,
    BadWords,
    Positive,
    Priority,
    RepetitionPenalty,
    Salt,
    Share,
    StopText,
    Temperature,
    Timeout,
    TokenId,
    TokenIds,
    Top,
    TopK,
    Unit,
    WidePenalty,
)


class Options(OwnFields, kw_only=True):
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: Unit | None = None
    typical_p: Share | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: WidePenalty | None = None
    frequency_penalty: WidePenalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MOST)] | None = None
    seed: int | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MOST)] | None = None
    """-1 and -2 take what the context window leaves."""
    num_ctx: Positive | None = None
    """A smaller window for this request; a larger one than the model's is the model's."""
    stop: StopText | list[StopText] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: BadWords | None = None


REFUSED_OPTIONS: dict[str, tuple[Any, ...]] = foreign(Options.__struct_fields__) | {
    "penalize_newline": (True,),
}

ADVISORY_OPTIONS = frozenset(
    {
        "num_keep",  # says what stays when a context is shifted, and ours never is
        "mirostat_tau",
        "mirostat_eta",
        "numa",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "embedding_only",
        "use_mmap",
        "use_mlock",
        "num_thread",
    }
)

KNOWN_OPTIONS = frozenset(Options.__struct_fields__) | ADVISORY_OPTIONS | frozenset(REFUSED_OPTIONS)


class OllamaCommon(OwnFields, kw_only=True):
    """What chat and generate share."""

    model: str | None = None
    stream: bool | None = None
    """True if left out."""
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    cache_salt: Salt | None = None
    """Not Ollama's own: cached state is shared only with requests of the same salt."""
    priority: Priority | None = None
    timeout: Timeout | None = None
    """Seconds until the request ends with an error; as priority, not Ollama's own."""


class OllamaCalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Files in base64."""
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaCommon):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolWish | None = None
    """As chat of OpenAI's has it; Ollama itself has no such field yet."""


class OllamaGenerateRequest(OllamaCommon):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[TokenId] | None = None
    images: list[str] | None = None
    """Files in base64."""


REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = {
    "truncate": (False,),
    "shift": (False,),
}

REFUSED_BY_GENERATE: dict[str, tuple[Any, ...]] = REFUSED_BY_CHAT | {
    "suffix": ("",),
    "template": ("",),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
