"""Ollama's messages in OpenAI's terms: thoughts, calls with ids, and results tied to their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.api.ollama.schema import OllamaMessage
from millrace.errors import Unsupported


def to_openai(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    found = []
    waiting: list[tuple[str, str]] = []
    count = 0
    for message in messages:
        if message.images:
            raise Unsupported("'images' are not supported by this server yet.", param="images")
        said: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.role == "tool":
            said |= _result_of(message, waiting)
        elif message.tool_calls:
            calls = []
            for call in message.tool_calls:
                id = call.id or f"call_{count}"
                count += 1
                waiting.append((id, call.function.name))
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": id, "type": "function", "function": function})
            said["tool_calls"] = calls
        found.append(said)
    return found


def _result_of(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, str]:
    """Which call a result answers: the named one, else the oldest without a result."""
    fits = [c for c in waiting if c[0] == message.tool_call_id]
    fits = fits or [c for c in waiting if c[1] == message.tool_name] or waiting
    if not fits:
        return {"name": message.tool_name} if message.tool_name else {}
    chosen = fits[0]
    waiting.remove(chosen)
    id, name = chosen
    return {"tool_call_id": id, "name": message.tool_name or name}
