"""The wire types of OpenAI's requests, and the line between honoured, refused and advisory fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from millrace.api.sampling import AnswerFields
from millrace.errors import BadRequest
from millrace.serving.ranges import Choices, Count, Labels, Positive, StopText, Temperature, Top
from millrace.serving.thinking import ThinkingWish


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    """One last chunk with the request's usage."""
    continuous_usage_stats: bool = False
    """Beside that, every chunk has the usage so far of its choice's prompt, as vLLM's do."""
    include_obfuscation: bool | None = None
    """Accepted: our chunks carry no padding either way."""


class OpenAICommon(AnswerFields, kw_only=True):
    """What chat, completions and responses share."""

    model: str | None = None
    ttl: float | str | None = None
    """How long the model is to stay loaded after this, as LM Studio has it; below 0 for ever."""
    temperature: Temperature | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Choices | None = None
    stop: StopText | list[StopText] | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TalkFields(OpenAICommon, kw_only=True):
    """What chat and responses share beyond that: how the model is told to think."""

    enable_thinking: bool | None = None
    thinking: ThinkingWish | None = None
    """The same in another spelling, with a budget if wished."""
    thinking_token_budget: Count | None = None
    chat_template_kwargs: Labels | None = None


class ImageUrl(msgspec.Struct):
    url: str
    """A data URI, or an http(s) address."""
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(msgspec.Struct):
    url: str


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    video_url: str | VideoUrl | None = None


class OpenAIMessage(msgspec.Struct):
    """Checked here, and passed on as it came: templates may use fields of their own."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    audio: dict[str, Any] | None = None


class FunctionCall(msgspec.Struct):
    """A call as assistants made it before there were tools."""

    name: str
    arguments: str = "{}"


class ToolName(msgspec.Struct):
    name: str


class NamedFunction(msgspec.Struct, tag="function", tag_field="type"):
    function: ToolName


class NamedCustom(msgspec.Struct, tag="custom", tag_field="type"):
    custom: ToolName


class Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class AllowedTools(msgspec.Struct, tag="allowed_tools", tag_field="type"):
    """Only these of the tools may be called."""

    allowed_tools: Allowed


ToolWish = Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools


class ChatRequest(TalkFields, kw_only=True):
    messages: Annotated[list[OpenAIMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolWish | None = None
    functions: list[dict[str, Any]] | None = None
    """The older spelling of tools, answered in kind."""
    function_call: Literal["none", "auto"] | ToolName | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    web_search_options: dict[str, Any] | None = None
    """A hosted tool: left out, and named in `x-millrace-ignored`."""
    add_generation_prompt: bool | None = None
    """True if left out, unless the last message is continued."""
    continue_final_message: bool | None = None


class CompletionRequest(OpenAICommon, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Count | None = None
    """0 makes nothing: with `echo` it scores the prompt."""
    max_completion_tokens: Count | None = None
    logprobs: Top | None = None
    prompt_logprobs: Top | None = None
    echo: bool | None = None
    suffix: str | None = None
    """What follows the text that is wanted; for models that fill in the middle."""
    best_of: Choices | None = None


ADVISORY = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    }
)
"""Fields that only label or advise: accepted, whatever they say."""

REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "audio": ()}


def token_limit(wire: OpenAICommon) -> int | None:
    """`max_completion_tokens` is the newer name of `max_tokens`."""
    limit = wire.max_completion_tokens
    return wire.max_tokens if limit is None else limit


def check_end(begins: bool | None, continues: bool | None) -> None:
    """Raise that an answer is asked both to begin (`add_generation_prompt`) and to go on with the last
    message (`continue_final_message`)."""
    if begins and continues:
        raise BadRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true: the answer either "
            "goes on with the last message or begins after it.",
            param="continue_final_message",
        )
