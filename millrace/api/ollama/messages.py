"""Ollama's messages as turns: thoughts, calls with ids, and results tied to their calls."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from millrace.api.ollama.schema import OllamaMessage
from millrace.text.conversation import ConversationTurn, ImagePart, Part, TextPart, TurnCall


def turns_of(messages: Sequence[OllamaMessage]) -> list[ConversationTurn]:
    found = []
    calls = _OpenCalls()
    count = 0
    for at, message in enumerate(messages):
        content = shown(message.content or "", message.images, f"messages[{at}].images")
        said = ConversationTurn(message.role, content, reasoning=message.thinking or None)
        if message.role == "tool":
            said.call_id, said.name = calls.answered(message)
        elif message.tool_calls:
            for call in message.tool_calls:
                id = call.id or f"call_{count}"
                count += 1
                calls.add(id, call.function.name)
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


class _OpenCalls:
    """The calls without a result, found by their ids, by their names, or as the oldest."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, str]] = {}
        self._by_id: dict[str, deque[int]] = {}
        self._by_name: dict[str, deque[int]] = {}
        self._all: deque[int] = deque()
        self._numbers = itertools.count()

    def add(self, id: str, name: str) -> None:
        number = next(self._numbers)
        self._open[number] = id, name
        self._by_id.setdefault(id, deque()).append(number)
        self._by_name.setdefault(name, deque()).append(number)
        self._all.append(number)

    def answered(self, message: OllamaMessage) -> tuple[str | None, str | None]:
        """The id and the name of the call that a result answers: the one with its id, else the oldest of
        its name, else the oldest."""
        queues = (
            self._by_id.get(message.tool_call_id or ""),
            self._by_name.get(message.tool_name or ""),
            self._all,
        )
        for queue in queues:
            while queue:
                if (found := self._open.pop(queue.popleft(), None)) is not None:
                    return found[0], message.tool_name or found[1]
        return None, message.tool_name
