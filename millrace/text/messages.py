"""Messages as clients send them, made into exactly what a model's template renders rightly.

Takes the OpenAI shape; the template's style, found by probing, says what to change. Roles, calls,
results, reasoning and contents are brought into that style here and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import BadRequest
from millrace.text import embedded
from millrace.text.formats.call_encoder import Call, write_calls
from millrace.text.formats.style import Message, Style
from millrace.text.formats.syntax import HeaderCalls, OutputFormat
from millrace.text.formats.tool_prompt import show_result, show_tools
from millrace.text.formats.tools import tool_from_openai
from millrace.text.picture_turns import (
    PictureStyle,
    digests_in,
    has_pictures,
    parts_of,
    shown_results,
)

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class PreparedMessages:
    """What goes to the template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    """Of the pictures, in the order in which the template meets them."""


def prepare(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    style: Style,
    format: OutputFormat,
    pictures: PictureStyle | None = None,
) -> PreparedMessages:
    """The conversation in the template's style; what was passed in is left as it was."""
    found = [_checked(index, message) for index, message in enumerate(messages)]
    found = _named_results(found)
    if pictures is not None:
        found = shown_results(found, pictures)
    digests = digests_in(found)
    found = _renamed_ids(found, style, format)
    specs = [tool_from_openai(tool) for tool in tools or ()]
    arguments: dict[str, Any] = {}
    if style.functions:
        arguments = {"functions": json.dumps(list(tools or ()), ensure_ascii=False), "datetime": ""}
    elif specs and not style.tools:
        found = _with_system(found, show_tools(format, specs), style)
    found = [_content(message, style, pictures) for message in _systems(found, style)]
    if style.one_call:
        found = _one_call_each(found)
    found = [part for message in found for part in _calls(message, style, format)]
    found = [_result(message, style, format) for message in found]
    found = [_reasoning(message, style) for message in found]
    if not style.said_after_results:
        found = _said_with_results(found, style)
    if style.alternate or not style.results:
        found = _merged(found)
    if style.user_first:
        found = _user_first(found)
    if pictures is not None and pictures.parts:
        digests = digests_in(found)
    offered = list(tools) if tools and style.tools else None
    return PreparedMessages(found, offered, arguments, digests)


def _checked(index: int, message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(
            f"Message {index} has the role {role!r}; it must be one of {', '.join(_ROLES)}.",
            param="messages",
        )
    found = dict(message)
    if role == "function":
        found["role"] = "tool"
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    return found


def _named_results(messages: list[Message]) -> list[Message]:
    """Some templates show a result under its function's name, which clients leave out."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = _function(call)["name"]
        if message["role"] == "tool" and not message.get("name"):
            name = names.get(str(message.get("tool_call_id")))
            message = {**message, "name": name} if name else message
        found.append(message)
    return found


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("A tool call in the messages has no function name.", param="messages")
    return function


def _renamed_ids(messages: list[Message], style: Style, format: OutputFormat) -> list[Message]:
    """Ids in the form the family demands: nine characters, or the function's name and a count."""
    counted = any(isinstance(s, HeaderCalls) and s.id_is_header for s in format.calls)
    if not style.short_ids and not counted:
        return messages
    names: dict[str, str] = {}
    found = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                old = str(call.get("id"))
                if counted:
                    names[old] = f"functions.{_function(call)['name']}:{len(names)}"
                else:
                    names[old] = _nine(old)
                calls.append({**call, "id": names[old]})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            old = str(message.get("tool_call_id"))
            message = {**message, "tool_call_id": names.get(old, old if counted else _nine(old))}
        found.append(message)
    return found


def _nine(identifier: str) -> str:
    if len(identifier) == 9 and identifier.isascii() and identifier.isalnum():
        return identifier
    return hashlib.sha256(identifier.encode()).hexdigest()[:9]


def _with_system(messages: list[Message], text: str, style: Style) -> list[Message]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        said = plain_text(first.get("content"), style)
        return [{**first, "content": f"{said}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _systems(messages: list[Message], style: Style) -> list[Message]:
    """One system message at the top, if the template has any; later ones where it allows them."""
    found: list[Message] = []
    head: list[str] = []
    leading = True
    for message in messages:
        role = message["role"]
        if role not in ("system", "developer"):
            leading = False
            found.append(message)
        elif leading and not (role == "developer" and style.developer):
            head.append(plain_text(message.get("content"), style))
        elif leading or style.late_system:
            found.append({**message, "role": role if style.developer else "system"})
        else:
            found.append({**message, "role": "user"})
    if not head:
        return found
    text = "\n\n".join(head)
    if style.system:
        return [{"role": "system", "content": text}, *found]
    for index, message in enumerate(found):
        if message["role"] == "user":
            found[index] = {**message, "content": _joined(text, message.get("content"))}
            return found
        if style.user_first:
            break
    return [{"role": "user", "content": text}, *found]


def plain_text(content: Any, style: Style) -> str:
    """The text of a content, whether written as a string or as parts.

    A template that knows no parts cannot set them apart, so that each gets a line of its own.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, Mapping) and isinstance(part.get("refusal"), str):
            parts.append(part["refusal"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(
                f"A content part of type '{kind}' cannot be given to this model here; it takes "
                "text only.",
                param="messages",
            )
    return ("\n" if style.parts == "flatten" else "").join(parts)


def _is_text(content: Any) -> bool:
    return isinstance(content, str) or all(
        isinstance(part, str) or "text" in part or "refusal" in part for part in content
    )


def _content(message: Message, style: Style, pictures: PictureStyle | None) -> Message:
    content = message.get("content")
    if pictures is not None and has_pictures(message):
        return {**message, "content": parts_of(message["content"], pictures)}
    if content is None:
        return {**message, "content": None if message.get("tool_calls") else ""}
    if message["role"] in ("user", "assistant", "tool") and not _is_text(content):
        if style.parts == "flatten":
            return {**message, "content": plain_text(content, style)}
        return message
    text = plain_text(content, style)
    if style.parts == "require" and message["role"] == "user":
        return {**message, "content": [{"type": "text", "text": text}]}
    return {**message, "content": text}


def _joined(first: str, second: Any) -> Any:
    if isinstance(second, list):
        return [{"type": "text", "text": first + "\n\n"}, *second]
    return f"{first}\n\n{second}" if second else first


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Calls made together, told as calls made one after another, each with its result."""
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        by_call: dict[Any, list[Message]] = {}
        for result in results:
            by_call.setdefault(result.get("tool_call_id"), []).append(result)
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": None}
            found.append({**first, "tool_calls": [call]})
            found += by_call.get(call.get("id")) or results[number : number + 1]
    return found


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    given = _function(call).get("arguments")
    if isinstance(given, Mapping):
        return dict(given)
    try:
        value = embedded.read(given) if given else {}
    except (TypeError, ValueError):
        return {"text": str(given)}
    return value if isinstance(value, dict) else {"value": value}


def _calls(message: Message, style: Style, format: OutputFormat) -> list[Message]:
    calls = message.get("tool_calls")
    if not calls:
        return [message]
    content = message.get("content") or ""
    if not style.calls:
        written = write_calls(
            format,
            [Call(_function(c)["name"], _arguments(c), str(c.get("id") or "0")) for c in calls],
        )
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        text = f"{plain_text(content, style)}\n{written}" if content else written
        return [{**rest, "content": text}]
    shaped = []
    for call in calls:
        arguments: Any = _arguments(call)
        if not style.mapping:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": _function(call)["name"], "arguments": arguments}
        shaped.append({"id": call.get("id"), "type": "function", "function": function})
    found = {**message, "tool_calls": shaped}
    if content and style.content_with_calls:
        return [found]
    before: list[Message] = []
    if content and not style.alternate:
        before = [{"role": "assistant", "content": content}]
    if style.no_content == "absent":
        del found["content"]
    else:
        found["content"] = "" if style.no_content == "empty" else None
    return [*before, found]


def _result(message: Message, style: Style, format: OutputFormat) -> Message:
    if message["role"] != "tool" or style.results:
        return message
    said = plain_text(message.get("content"), style)
    text = show_result(format, str(message.get("name") or ""), said)
    return {"role": "user", "content": text}


def _reasoning(message: Message, style: Style) -> Message:
    """Earlier reasoning under the key the template reads, and under no other."""
    if message["role"] != "assistant":
        return message
    keys = ("reasoning_content", "reasoning", "thinking", "thought")
    text = next((message[key] for key in keys if isinstance(message.get(key), str)), "")
    found = {key: value for key, value in message.items() if key not in keys}
    if not text or style.reasoning is None:
        return found
    content = found.get("content")
    if style.reasoning == "parts":
        said = [{"type": "text", "text": content}] if content and isinstance(content, str) else []
        return {**found, "content": [{"type": "thinking", "thinking": text}, *said]}
    if style.reasoning_or_content and found.get("tool_calls") and content:
        text, found["content"] = f"{text}\n\n{content}", ""
    return {**found, style.reasoning: text}


def _said_with_results(messages: list[Message], style: Style) -> list[Message]:
    """What a user says beside the results of tools, as a part of the last of them."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and last["role"] == "tool" and message["role"] == "user":
            content = last.get("content")
            if not isinstance(content, _Merging):
                content = _Merging(plain_text(last.get("content"), style))
                found[-1] = {**last, "content": content}
            content.add(plain_text(message.get("content"), style))
        else:
            found.append(message)
    return [_whole(message) for message in found]


def _merged(messages: list[Message]) -> list[Message]:
    """Neighbours of one role as one message, for templates that demand strict turns."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if (
            last is not None
            and last["role"] == message["role"] != "tool"
            and not last.get("tool_calls")
            and not message.get("tool_calls")
        ):
            content = last.get("content")
            if not isinstance(content, _Merging):
                content = _Merging(content)
                found[-1] = {**last, "content": content}
            content.add(message.get("content"))
        else:
            found.append(message)
    return [_whole(message) for message in found]


class _Merging:
    """The content of messages that become one, put together at the end: thousands may be merged."""

    def __init__(self, content: Any) -> None:
        self._texts: list[str] = [content] if isinstance(content, str) else []
        self._parts: list[Any] | None = None if isinstance(content, str) else list(content or [])
        """Of a list, which also whatever follows one is."""

    def add(self, content: Any) -> None:
        if self._parts is not None:
            more = content if isinstance(content, list) else [{"type": "text", "text": content}]
            self._parts += more
        elif isinstance(content, list):
            self._parts = _joined(self.whole(), content)
        elif content:
            self._texts.append(content)

    def whole(self) -> Any:
        return self._parts if self._parts is not None else "\n\n".join(self._texts)


def _whole(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": content.whole()} if isinstance(content, _Merging) else message


def _user_first(messages: list[Message]) -> list[Message]:
    """An empty turn of the user before an assistant that speaks first."""
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if begin == len(messages) or messages[begin]["role"] == "user":
        return messages
    return [*messages[:begin], {"role": "user", "content": ""}, *messages[begin:]]
