"""The wire types of OpenAI's answers, for those who read the description; what is sent is held to
them by tests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.api.logprobs import TokenEntry
from millrace.serving.memory import ModelMemory
from millrace.text.loops import AnswerLoop

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class CalledCustom(msgspec.Struct):
    name: str
    input: str


class FunctionToolCall(msgspec.Struct, tag="function", tag_field="type"):
    id: str
    function: CalledFunction


class CustomToolCall(msgspec.Struct, tag="custom", tag_field="type"):
    id: str
    custom: CalledCustom


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[FunctionToolCall | CustomToolCall] | None = None
    function_call: CalledFunction | None = None


class ScoredToken(TokenEntry):
    top_logprobs: list[TokenEntry]


class ChatLogprobs(msgspec.Struct):
    content: list[ScoredToken]
    refusal: None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    matched_stop: str | int | None
    finish_details: AnswerLoop | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, str] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    matched_stop: str | int | None = None
    finish_details: AnswerLoop | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """A piece of a streamed answer; the stream ends with `[DONE]`, or with an error."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | None = None


class CompletionScores(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: FinishReason | None
    matched_stop: str | int | None = None
    finish_details: AnswerLoop | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class Completion(msgspec.Struct):
    """A whole answer, or a piece of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None


class DefaultSampling(msgspec.Struct):
    """The sampling of a request that sets none."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int | None
    """None is what the prompt leaves of the context window."""


class ModelCard(msgspec.Struct):
    """As OpenAI's clients know it, or, for those that send `anthropic-version`, as Anthropic's do."""

    id: str
    object: Literal["model"] | None = None
    created: int | None = None
    owned_by: str | None = None
    context_window: int | None = None
    max_model_len: int | None = None
    input_modalities: list[Literal["text", "image", "video"]] | None = None
    """What it takes in."""
    output_modalities: list[Literal["text", "embeddings", "scores"]] | None = None
    """What it makes."""
    alias_of: str | None = None
    state: Literal["unloaded", "loading", "loaded", "failed", "broken"] | None = None
    """A broken one has files that are missing or cannot be read."""
    pinned: bool | None = None
    stage: str | None = None
    """What a model that is being loaded is at."""
    memory: ModelMemory | None = None
    """Of a loaded one, in bytes."""
    expires_at: str | None = None
    """When it is unloaded unless it is used before."""
    error: str | None = None
    """Why it cannot be loaded, or could not be a moment ago."""
    default_sampling_params: DefaultSampling | None = None
    profile: dict[str, Any] | None = None
    """What is set for it where a request does not say otherwise."""
    root: str | None = None
    """Of an adapter, its folder."""
    parent: str | None = None
    """Of an adapter, the model it changes."""
    type: Literal["model"] | None = None
    display_name: str | None = None
    created_at: str | None = None
    lifecycle: Literal["active"] | None = None
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] | None = None
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool | None = None
