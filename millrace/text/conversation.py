"""A chat request as every protocol hands it over: turns with typed parts, tools, and options.

Owns the shape between the wires and the templates. What a template wants of it is `messages.py`'s
to know, which takes it as `rendered` has it; what a wire calls it, its adapter's.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest, Unsupported
from millrace.text.formats.tools import ToolSpec, tool_from_openai
from millrace.text.pictures import Expansion

ToolChoice = Literal["none", "auto", "required"]


class TextPart(msgspec.Struct, tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag="refusal"):
    refusal: str


class ImagePart(msgspec.Struct, tag="image", omit_defaults=True):
    """A picture: where it is said to be, and its digest once it was found there."""

    source: str = ""
    """A data URI, a web address, a file: address, or the file in base64."""
    low: bool = False
    """Few pixels are enough."""
    where: str = ""
    """The part of the request that it is, for errors."""
    moving: bool = False
    """It is a video, of which some frames are seen."""
    digest: str = ""


Part = TextPart | RefusalPart | ImagePart


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


class ConversationTurn(msgspec.Struct, omit_defaults=True):
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
        if isinstance(self.content, list):
            found["content"] = [_rendered(part) for part in self.content]
        elif self.content is not UNSET:
            found["content"] = self.content
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [call.rendered() for call in self.calls]
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        if self.name is not None:
            found["name"] = self.name
        return found

    @property
    def pictures(self) -> list[ImagePart]:
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if isinstance(part, ImagePart)]


def _rendered(part: Part) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "digest": part.digest}
    found: dict[str, Any] = msgspec.to_builtins(part)
    return found


_OWN = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"})


def turn_of(message: Mapping[str, Any], where: str = "messages") -> ConversationTurn:
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
        given["content"] = _content_of(message["content"], f"{where}.content")
    try:
        return msgspec.convert(given, ConversationTurn)
    except msgspec.ValidationError as error:
        raise BadRequest(f"A message cannot be read: {error}.", param="messages") from error


def _content_of(content: Any, where: str) -> Any:
    """Parts, told by what they hold where they do not say what they are."""
    if not isinstance(content, list):
        return content
    return [_part_of(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _part_of(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    if "text" in part:
        return {"type": "text", **part}
    if part.get("type") in ("image_url", "input_image", "image", "video_url", "video"):
        return msgspec.to_builtins(image_of(part, where)) | {"type": "image"}
    return part


_DETAILS = ("auto", "low", "high", "original")


def image_of(part: Mapping[str, Any], where: str) -> ImagePart:
    """A picture in OpenAI's terms, chat's or those of responses, or plainly under `image`."""
    moving = part.get("type") in ("video_url", "video")
    names = ("video_url", "video", "url") if moving else ("image_url", "image", "url")
    given: Any = next((part[k] for k in names if part.get(k)), None)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if isinstance(given, bytes):
        given = base64.b64encode(given).decode()
    if part.get("file_id") and not given:
        raise Unsupported(
            f"{where}: there are no uploaded files on this server. Send the picture itself, as a "
            "data URI.",
            param=where,
        )
    if not isinstance(given, str) or not given:
        what = "a video" if moving else "a picture"
        raise BadRequest(f"{where}: {what} needs an address or data.", param=where)
    if detail not in (None, *_DETAILS):
        raise BadRequest(f"{where}.detail must be one of {', '.join(_DETAILS)}.", param=where)
    return ImagePart(given, detail == "low", where, moving)


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

    messages: Sequence[ConversationTurn]
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
    expansions: dict[str, Expansion] = field(default_factory=dict)
    """What becomes of its pictures, by their digests, once they were found."""

    def __post_init__(self) -> None:
        # A convenience for programs: messages as they would send them.
        self.messages = [
            m if isinstance(m, ConversationTurn) else turn_of(m, f"messages[{at}]")
            for at, m in enumerate(self.messages)
        ]
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

    @property
    def pictures(self) -> list[ImagePart]:
        """In the order of the turns."""
        return [part for turn in self.messages for part in turn.pictures]

    def adopt(self, other: Conversation) -> None:
        """Take over what is known of pictures that another conversation shows as well."""
        known = {(part.source, part.low, part.moving): part.digest for part in other.pictures}
        for part in self.pictures:
            part.digest = known[part.source, part.low, part.moving]
        self.expansions = other.expansions

    def without_sources(self) -> Conversation:
        """The same, with pictures known by their digests alone: the files are not for others."""
        if not any(part.source for part in self.pictures):
            return self
        return replace(self, messages=[_without_sources(turn) for turn in self.messages])

    def rendered(self) -> list[dict[str, Any]]:
        """The turns as templates have them."""
        return [turn.rendered() for turn in self.messages]


def _without_sources(turn: ConversationTurn) -> ConversationTurn:
    if not isinstance(turn.content, list):
        return turn
    parts: list[Part] = [
        ImagePart(digest=part.digest) if isinstance(part, ImagePart) else part
        for part in turn.content
    ]
    return msgspec.structs.replace(turn, content=parts)
