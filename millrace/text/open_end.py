"""A conversation whose last message is to be gone on with: a mark where it ends, and the cut there."""

from __future__ import annotations

from millrace.errors import BadRequest
from millrace.text.formats.style import Message

_OPEN_END = "\ue000\ue001"
"""Private characters, which no template and no text has."""


def open_ended(messages: list[Message]) -> list[Message]:
    """The conversation with a mark where its final assistant message is to go on."""
    last = messages[-1]
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    text = parts[-1].get("text") if parts else None
    if last["role"] != "assistant" or not isinstance(text, str):
        raise BadRequest(
            "Only a final message of the assistant that is text can be continued.",
            param="messages",
        )
    text = text.rstrip() + _OPEN_END
    ended = [*parts[:-1], {**parts[-1], "text": text}] if parts is content else text
    return [*messages[:-1], {**last, "content": ended}]


def cut(rendered: str) -> str:
    """A prompt that ends at that mark, inside the final message."""
    before, found, _ = rendered.rpartition(_OPEN_END)
    if not found:
        raise BadRequest(
            "The final assistant message cannot be continued: the model's chat template does not "
            "render it as it stands.",
            param="messages",
        )
    return before
