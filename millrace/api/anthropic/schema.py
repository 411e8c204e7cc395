"""The wire types of Anthropic's requests, and the line between honoured, refused and advisory fields.

Blocks are told apart by their type; fields of blocks that only advise (`cache_control`) are not
named here, and so are accepted anywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from millrace.api.sampling import AnswerFields
from millrace.serving.ranges import Labels, Positive, StopText, Unit


class Tagged(msgspec.Struct, tag_field="type"):
    """An object that its `type` tells apart."""


class Text(Tagged, tag="text"):
    text: str


class Base64Source(Tagged, tag="base64"):
    data: str
    media_type: str = ""


class UrlSource(Tagged, tag="url"):
    url: str


class FileSource(Tagged, tag="file"):
    """A file that was uploaded earlier; known by name, so that it can be refused by name."""

    file_id: str


class Image(Tagged, tag="image"):
    source: Base64Source | UrlSource | FileSource


class DocumentSource(msgspec.Struct):
    type: str
    data: str | None = None
    content: str | list[Text | Image] | None = None


class Citations(msgspec.Struct):
    enabled: bool = False


class Document(Tagged, tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class ToolUse(Tagged, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Tagged, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image | Document] | None = None
    is_error: bool | None = None


class AnthropicThought(Tagged, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThought(Tagged, tag="redacted_thinking"):
    data: str = ""


Block = Text | Image | Document | ToolUse | ToolResult | AnthropicThought | RedactedThought


class AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool of the client's own, or one that Anthropic would run or know, told by its type."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class AnthropicToolChoice(Tagged):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(AnthropicToolChoice, tag="auto"):
    pass


class AnyChoice(AnthropicToolChoice, tag="any"):
    pass


class ToolChoice(AnthropicToolChoice, tag="tool", kw_only=True):
    name: str


class NoChoice(AnthropicToolChoice, tag="none"):
    pass


class AnthropicThinking(Tagged):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingOn(AnthropicThinking, tag="enabled", kw_only=True):
    budget_tokens: Positive


class ThinkingAdaptive(AnthropicThinking, tag="adaptive"):
    pass


class ThinkingOff(AnthropicThinking, tag="disabled"):
    pass


class Form(Tagged, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Form | None = None
    task_budget: Any = None


class Edit(msgspec.Struct):
    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct):
    edits: list[Edit] = []


class PromptFields(AnswerFields, kw_only=True):
    """What decides the prompt, which is all that counting tokens needs, and what may come with it."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None
    output_config: OutputConfig | None = None
    output_format: Form | None = None
    """The older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    container: Any = None
    thread: Any = None
    """A conversation that the server holds."""
    chat_template_kwargs: Labels | None = None


class MessagesRequest(PromptFields, kw_only=True):
    max_tokens: Positive
    ttl: float | str | None = None
    """How long the model is to stay loaded after this, as LM Studio has it; below 0 for ever."""
    stream: bool | None = None
    stop_sequences: list[StopText] | None = None
    temperature: Unit | None = None
    skip_special_tokens: bool | None = None


ADVISORY = frozenset(
    {
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that only label or advise: accepted, whatever they say."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "compaction": (),
}
"""What would change the answer and is not honoured, with the values that ask for nothing."""
