"""Ollama's messages as turns: thoughts, calls with ids, and results tied to their calls."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.api.ollama.schema import OllamaMessage
from millrace.text.conversation import ConversationTurn, ImagePart, Part, TextPart, TurnCall


def turns_of(messages: Sequence[OllamaMessage]) -> list[ConversationTurn]:
    found = []
    waiting: list[tuple[str, str]] = []
    count = 0
    for at, message in enumerate(messages):
        content = shown(message.content or "", message.images, f"messages[{at}].images")
        said = ConversationTurn(message.role, content, reasoning=message.thinking or None)
        if message.role == "tool":
            said.call_id, said.name = _result_of(message, waiting)
        elif message.tool_calls:
            for call in message.tool_calls:
                id = call.id or f"call_{count}"
                count += 1
                waiting.append((id, call.function.name))
                said.calls.append(TurnCall(call.function.name, call.function.arguments, id))
        found.append(said)
    return found


def shown(text: str, images: Sequence[str] | None, where: str) -> str | list[Part]:
    """A text with pictures before it, where Ollama puts them."""
    if not images:
        return text
    pictures: list[Part] = [
        ImagePart(image, where=f"{where}[{at}]") for at, image in enumerate(images)
    ]
    return [*pictures, TextPart(text)] if text else pictures


def _result_of(
    message: OllamaMessage, waiting: list[tuple[str, str]]
) -> tuple[str | None, str | None]:
    """The id and the name of the call that a result answers: the named one, else the oldest
    without a result."""
    fits = [c for c in waiting if c[0] == message.tool_call_id]
    fits = fits or [c for c in waiting if c[1] == message.tool_name] or waiting
    if not fits:
        return None, message.tool_name
    chosen = fits[0]
    waiting.remove(chosen)
    id, name = chosen
    return id, message.tool_name or name
