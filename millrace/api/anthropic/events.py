"""The wire objects of an answer: the message with its blocks, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.api.answer import one_line
from millrace.api.errors import anthropic_error
from millrace.errors import MillraceError
from millrace.text.deltas import Usage
from millrace.text.loops import AnswerLoop

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class _Tagged(msgspec.Struct, tag_field="type"):
    pass


class Details(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """`usage`: the three kinds of input add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: Details


def cost_of(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt - usage.cached - usage.written,
        cache_creation_input_tokens=usage.written,
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.completion,
        output_tokens_details=Details(usage.reasoning),
    )


class TextBlock(_Tagged, tag="text"):
    text: str = ""


class ThinkingBlock(_Tagged, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(_Tagged, tag="tool_use"):
    id: str
    name: str
    input: Any = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(_Tagged, tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    finish_details: AnswerLoop | msgspec.UnsetType = msgspec.UNSET
    usage: MessageUsage


class TextDelta(_Tagged, tag="text_delta"):
    text: str


class ThinkingDelta(_Tagged, tag="thinking_delta"):
    thinking: str


class SignatureDelta(_Tagged, tag="signature_delta"):
    signature: str


class InputJsonDelta(_Tagged, tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(_Tagged, tag="message_start"):
    message: MessageAnswer


class PingEvent(_Tagged, tag="ping"):
    pass


class BlockStart(_Tagged, tag="content_block_start"):
    index: int
    content_block: Block


class BlockChange(_Tagged, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(_Tagged, tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None = None
    finish_details: AnswerLoop | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(_Tagged, tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(_Tagged, tag="message_stop"):
    pass


class Count(msgspec.Struct):
    """The answer to a request that only counts."""

    input_tokens: int


StreamEvent = (
    MessageStart | PingEvent | BlockStart | BlockChange | BlockStop | MessageDelta | MessageStop
)


def encoded(event: StreamEvent) -> bytes:
    """As a server-sent event, named by its type."""
    return _named(str(type(event).__struct_config__.tag), event)


def error_event(error: MillraceError) -> bytes:
    """What ends a stream that broke."""
    return _named("error", anthropic_error(error))


def _named(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + one_line(value) + b"\n\n"
