"""A chat request as every protocol hands it over: turns with typed parts, tools, and wishes.

Owns the shape between the wires and the templates. What a template wants of it is `messages.py`'s
to know, which takes it as `rendered` has it; what a wire calls it, its adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest
from millrace.text.formats.tools import ToolSpec, tool_from_openai

ToolChoice = Literal["none", "auto", "required"]


class TextPart(msgspec.Struct, tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag="refusal"):
    refusal: str


Part = TextPart | RefusalPart


class TurnCall(msgspec.Struct, omit_defaults=True):
    """A call of a function, as the assistant made it earlier."""

    name: str
    arguments: Any = UNSET
    """JSON as text, or the object itself."""
    id: str | None = None

    def rendered(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.arguments is not UNSET:
            function["arguments"] = self.arguments
        found = {"type": "function", "function": function}
        return found if self.id is None else {"id": self.id, **found}


class Turn(msgspec.Struct, omit_defaults=True):
    role: str
    content: str | list[Part] | UnsetType | None = UNSET
    reasoning: str | None = None
    calls: list[TurnCall] = []
    call_id: str | None = None
    """The call whose result this is."""
    name: str | None = None
    others: dict[str, Any] = {}
    """Fields that only the model's own template knows."""

    def rendered(self) -> dict[str, Any]:
        """In OpenAI's terms, as templates have them."""
        found: dict[str, Any] = {"role": self.role, **self.others}
        if self.content is not UNSET:
            parts = isinstance(self.content, list)
            found["content"] = msgspec.to_builtins(self.content) if parts else self.content
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [call.rendered() for call in self.calls]
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        if self.name is not None:
            found["name"] = self.name
        return found


_OWN = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"})


def turn_of(message: Mapping[str, Any]) -> Turn:
    """A message in OpenAI's terms, which was checked or is about to be."""
    given = {
        "role": message.get("role"),
        "reasoning": message.get("reasoning_content"),
        "calls": [_call_of(call) for call in message.get("tool_calls") or ()],
        "call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "others": {k: v for k, v in message.items() if k not in _OWN},
    }
    if "content" in message:
        given["content"] = _content_of(message["content"])
    try:
        return msgspec.convert(given, Turn)
    except msgspec.ValidationError as error:
        raise BadRequest(f"A message cannot be read: {error}.", param="messages") from error


def _content_of(content: Any) -> Any:
    """Parts, told by what they hold where they do not say what they are."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", **part} if isinstance(part, Mapping) and "text" in part else part
        for part in content
    ]


def _call_of(call: Any) -> TurnCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("A tool call in the messages has no function name.", param="messages")
    id = call.get("id")
    return TurnCall(
        function["name"], function.get("arguments", UNSET), id if isinstance(id, str) else None
    )


@dataclass
class Conversation:
    """A chat request, whatever protocol it came from."""

    messages: Sequence[Turn]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    """The one tool that must be called, with tool_choice `required`."""
    parallel: bool = True
    thinking: bool | None = None
    """Whether the model is to think; None leaves it to the model."""
    effort: str | None = None
    thinking_budget: int | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False

    def __post_init__(self) -> None:
        # A convenience for programs: messages as they would send them.
        self.messages = [m if isinstance(m, Turn) else turn_of(m) for m in self.messages]
        if self.effort == "none" and self.thinking is None:
            self.thinking = False
        for name in ("messages", "tools", "add_generation_prompt", "self"):
            if name in self.template_arguments:
                raise BadRequest(
                    f"The template argument '{name}' is the server's own.",
                    param=f"chat_template_kwargs.{name}",
                )

    @property
    def specs(self) -> list[ToolSpec]:
        if self.tool_choice == "none":
            return []
        return [tool_from_openai(t) for t in self.tools]

    def rendered(self) -> list[dict[str, Any]]:
        """The turns as templates have them."""
        return [turn.rendered() for turn in self.messages]
