"""Pictures in messages, brought to where a model's template shows them.

Templates that know parts show a picture as one; others get the placeholder in the text. Few show
pictures in the results of tools: elsewhere a turn of the user's shows them right after the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.errors import BadRequest, ModelError
from millrace.text.formats.style import Message, Template
from millrace.text.pictures import PictureWords

_FOLLOWS = "(The pictures of this result are in the next message.)"
_SHOWN = "The pictures of the tool's result:"


@dataclass(frozen=True)
class PictureStyle:
    """Where a template shows pictures."""

    words: PictureWords
    parts: bool = False
    """As parts of a user's message; otherwise as the placeholder in its text."""
    results: bool = False
    """As parts of a tool's result."""


def probe_pictures(template: Template, words: PictureWords) -> PictureStyle:
    user: Message = {"role": "user", "content": _probe_parts()}
    call = {"id": "abcdefgh0", "type": "function", "function": {"name": "one_a", "arguments": {}}}
    result: list[Message] = [
        {"role": "user", "content": "q1u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh0", "name": "one_a", "content": _probe_parts()},
    ]
    parts = _shows(template, [user], words)
    return PictureStyle(words, parts, parts and _shows(template, result, words))


def _probe_parts() -> list[dict[str, Any]]:
    return [{"type": "text", "text": "p1p"}, {"type": "image"}, {"type": "text", "text": "p2p"}]


def _shows(template: Template, messages: Sequence[Message], words: PictureWords) -> bool:
    try:
        text = template.render(messages, add_generation_prompt=False)
    except (BadRequest, ModelError):
        return False
    return text.count(words.placeholder) == 1 and "p1p" in text and "p2p" in text


def has_pictures(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(is_picture, content))


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def digests_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of all pictures, in the order in which a template meets them."""
    return [
        part["digest"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if is_picture(part)
    ]


def shown_results(messages: Sequence[Message], style: PictureStyle) -> list[Message]:
    """Pictures in results of tools, in turns of their own where the template shows none there."""
    found: list[Message] = []
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool" and shown:
            found.append(_turn_of(shown))
            shown = []
        if has_pictures(message):
            _refuse_elsewhere(message)
            if message["role"] == "tool" and not style.results:
                shown += [part for part in message["content"] if is_picture(part)]
                texts = [part for part in message["content"] if not is_picture(part)]
                message = {**message, "content": texts or _FOLLOWS}
        found.append(message)
    return [*found, _turn_of(shown)] if shown else found


def _turn_of(pictures: list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": _SHOWN}, *pictures]}


def _refuse_elsewhere(message: Message) -> None:
    if message["role"] not in ("user", "tool"):
        raise BadRequest(
            f"A message of role '{message['role']}' holds a picture; only those of users and tools "
            "may.",
            param="messages",
        )


def parts_of(content: Sequence[Any], style: PictureStyle) -> Any:
    """A content with pictures as the template has it."""
    parts = [_part(part) for part in content]
    if style.parts:
        return parts
    placeholder = style.words.placeholder
    return "\n".join(placeholder if is_picture(p) else p["text"] for p in parts)


def _part(part: Any) -> dict[str, Any]:
    if is_picture(part):
        return dict(part)
    if isinstance(part, Mapping):
        part = part.get("text", part.get("refusal"))
    return {"type": "text", "text": part}
