"""The wire type of a Responses request, and the line between honoured, refused and advisory fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.api.openai.schema import ADVISORY, TalkFields
from millrace.serving.ranges import Count, Labels, Positive, Top


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationRef(msgspec.Struct):
    id: str


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesRequest(TalkFields):
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Count | None = None
    """Counts calls of hosted tools, of which this server makes none."""
    metadata: Labels | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextConfig | None = None
    """The form of the answer's text."""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: Top | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompactRequest(msgspec.Struct, kw_only=True):
    """What of a conversation is to be made shorter."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "messages": (),
    "response_format": ({"type": "text"},),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}

LABELS = ADVISORY | {"client_metadata", "prompt_cache_options", "access_programs", "image"}
"""Fields that only label or advise."""
