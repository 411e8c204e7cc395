"""The machine between the two: pieces of an answer in, events of Anthropic's stream out.

A streamed answer sends these events; a whole one is their fold, so that the two cannot differ.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET
from pydantic_core import from_json

from millrace.api.anthropic.events import (
    Block,
    BlockChange,
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    PingEvent,
    SignatureDelta,
    StopReason,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    cost_of,
)
from millrace.api.encrypted_content import seal
from millrace.text.deltas import (
    Content,
    Delta,
    Event,
    Idle,
    Piece,
    PromptScores,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from millrace.text.embedded import mended

_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class Blocks:
    """Reads the events of one answer. `shows_thoughts` is false where the client wants none."""

    def __init__(self, id: str, model: str, shows_thoughts: bool = True) -> None:
        self._id = id
        self._model = model
        self._shows_thoughts = shows_thoughts
        self._begun = False
        self._index = -1
        self._open: Block | None = None
        self._thought = ""
        self._finish = TextFinish("stop")

    def feed(self, event: Event, usage: Usage) -> Iterator[StreamEvent]:
        """`usage` is what the request has cost so far.

        The message begins with the first event that comes, which knows what the cache gave.
        """
        if not self._begun:
            self._begun = True
            yield MessageStart(
                message=MessageAnswer(id=self._id, model=self._model, usage=cost_of(usage))
            )
            yield PingEvent()
        elif isinstance(event, Idle):
            yield PingEvent()
        match event:
            case Delta(piece=TextFinish() as finish):
                yield from self._close()
                self._finish = finish
            case Delta(piece=piece):
                yield from self._piece(piece)
            case Usage():
                yield MessageDelta(delta=self._ending(), usage=cost_of(event))
                yield MessageStop()
            case PromptScores() | Idle():
                pass

    def _piece(self, piece: Piece | TextFinish) -> Iterator[StreamEvent]:
        match piece:
            case Content(text=text):
                if not isinstance(self._open, TextBlock):
                    yield from self._begin(TextBlock())
                yield self._change(TextDelta(text=text))
            case Reasoning(text=text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._begin(ThinkingBlock())
                self._thought += text
                if self._shows_thoughts:
                    yield self._change(ThinkingDelta(thinking=text))
            case ToolCallStart(name=name):
                # The model's own ids may come again in a later answer; a client's books want
                # ids that never do.
                yield from self._begin(ToolUseBlock(id=f"toolu_{secrets.token_hex(12)}", name=name))
            case ToolCallArguments(text=text):
                yield self._change(InputJsonDelta(partial_json=text))

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        yield from self._close()
        self._index += 1
        self._open = block
        yield BlockStart(index=self._index, content_block=block)

    def _change(self, delta: BlockDelta) -> BlockChange:
        return BlockChange(index=self._index, delta=delta)

    def _close(self) -> Iterator[StreamEvent]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield self._change(SignatureDelta(signature=self._signature()))
            self._thought = ""
        self._open = None
        yield BlockStop(index=self._index)

    def _signature(self) -> str:
        """A thought that is not shown travels in its signature, to be there in the next turn."""
        if not self._shows_thoughts:
            return seal(self._thought)
        return hashlib.blake2b(self._thought.encode(), digest_size=24).hexdigest()

    def _ending(self) -> Ending:
        matched = self._finish.matched
        if isinstance(matched, str):
            return Ending(stop_reason="stop_sequence", stop_sequence=matched)
        loop = UNSET if self._finish.loop is None else self._finish.loop
        return Ending(stop_reason=_REASONS[self._finish.reason], finish_details=loop)


class Folding:
    """The whole message, built from the events as a client would."""

    def __init__(self) -> None:
        self._message: MessageAnswer | None = None
        self._open: Block = TextBlock()
        self._json = ""

    @property
    def message(self) -> MessageAnswer:
        assert self._message is not None, "a stream has at least a beginning"
        return self._message

    def add(self, event: StreamEvent) -> None:
        match event:
            case MessageStart(message=message):
                self._message = message
            case BlockStart(content_block=block):
                self._open, self._json = block, ""
            case BlockChange(delta=delta):
                self._apply(delta)
            case BlockStop():
                if isinstance(self._open, ToolUseBlock):
                    self._open.input = _input(self._json)
                self.message.content.append(self._open)
            case MessageDelta(delta=ending, usage=usage):
                self.message.stop_reason = ending.stop_reason
                self.message.stop_sequence = ending.stop_sequence
                self.message.finish_details = ending.finish_details
                self.message.usage = usage
            case MessageStop() | PingEvent():
                pass

    def _apply(self, delta: BlockDelta) -> None:
        match delta, self._open:
            case TextDelta(text=text), TextBlock() as block:
                block.text += text
            case ThinkingDelta(thinking=text), ThinkingBlock() as block:
                block.thinking += text
            case SignatureDelta(signature=signature), ThinkingBlock() as block:
                block.signature = signature
            case InputJsonDelta(partial_json=text), _:
                self._json += text


def _input(text: str) -> dict[str, Any]:
    """A call's input; of one that was cut off, what is complete, as clients of the stream read it."""
    try:
        value = mended(text)
    except ValueError:
        try:
            value = from_json(text, allow_partial=True)
        except ValueError:
            value = {}
    return value if isinstance(value, dict) else {}
