"""Anthropic's messages as the conversation every model is asked in, which has OpenAI's terms.

A turn's blocks come apart: results of tools become messages of their own, right after the calls
they answer; text, thoughts and calls become the parts of one message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from millrace.api.anthropic.schema import (
    AnthropicMessage,
    AnthropicThought,
    Base64Source,
    Block,
    Document,
    FileSource,
    Image,
    RedactedThought,
    Text,
    ToolResult,
    ToolUse,
    UrlSource,
)
from millrace.api.encrypted_content import unseal
from millrace.errors import BadRequest, Unsupported
from millrace.text.conversation import ConversationTurn, ImagePart, Part, TextPart, TurnCall

_LABEL = "x-anthropic-billing-header:"
"""How a coding agent marks a system block that is for the server's books, not for the model: it differs
in every session, and in the prompt it would part each from all that came before."""


_PLACES = {
    "system": "a system prompt",
    "assistant": "a message of the assistant",
    "document": "a document",
}


def conversation_of(
    system: str | Sequence[Text] | None, messages: Sequence[AnthropicMessage]
) -> list[ConversationTurn]:
    """All turns, the system prompt first; neighbours of one role are one turn."""
    turns: list[ConversationTurn] = []
    if system:
        texts = [system] if isinstance(system, str) else [block.text for block in system]
        if meant := [text for text in texts if not text.startswith(_LABEL)]:
            turns.append(ConversationTurn("system", _joined(meant)))
    called: set[str] = set()
    for role, group in itertools.groupby(enumerate(messages), key=lambda item: item[1].role):
        blocks = [pair for index, message in group for pair in _blocks(index, message)]
        if role == "assistant":
            turns.append(_assistant(blocks))
            called = {block.id for _, block in blocks if isinstance(block, ToolUse)}
        elif role == "user":
            _refuse_dangling(blocks, called)
            turns += _user(blocks)
        else:
            turns.append(ConversationTurn("system", _joined(_texts(blocks, "system"))))
    return turns


Placed = tuple[str, Block]
"""A block, and where in the request it stands."""


def _blocks(index: int, message: AnthropicMessage) -> list[Placed]:
    where = f"messages.{index}.content"
    if isinstance(message.content, str):
        return [(where, Text(text=message.content))]
    return [(f"{where}.{n}", block) for n, block in enumerate(message.content)]


def _user(blocks: Sequence[Placed]) -> list[ConversationTurn]:
    """Results first: a model expects them right after its calls, whatever was said beside them."""
    results: list[ConversationTurn] = []
    said: list[Placed] = []
    for where, block in blocks:
        if isinstance(block, ToolResult):
            results.append(_result(where, block))
        else:
            said.append((where, block))
    if said or not results:
        return [*results, ConversationTurn("user", _content(said, "user"))]
    return results


def _content(blocks: Sequence[Placed], role: str) -> str | list[Part]:
    """The text of blocks, or their parts where there is a picture among them."""
    if not any(isinstance(block, Image) for _, block in blocks):
        return _joined(_texts(blocks, role))
    return [
        _picture(where, block) if isinstance(block, Image) else TextPart(_text(where, block, role))
        for where, block in blocks
    ]


def _picture(where: str, block: Image) -> ImagePart:
    match block.source:
        case Base64Source(data=data, media_type=kind):
            if kind and not kind.startswith("image/"):
                raise BadRequest(f"{where}.source.media_type: '{kind}' is no picture.", param=where)
            return ImagePart(data, where=where)
        case UrlSource(url=url):
            return ImagePart(url, where=where)
        case FileSource():
            raise Unsupported(
                f"{where}: there are no uploaded files on this server; send the picture itself (a "
                "source of type 'base64').",
                param=where,
            )


def _refuse_dangling(blocks: Sequence[Placed], called: set[str]) -> None:
    for where, block in blocks:
        if isinstance(block, ToolResult) and block.tool_use_id not in called:
            raise BadRequest(
                f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: "
                f"{block.tool_use_id}. Each `tool_result` block must have a corresponding "
                "`tool_use` block in the previous message.",
                param=where,
            )


def _result(where: str, block: ToolResult) -> ConversationTurn:
    content: str | list[Part] = ""
    if isinstance(block.content, str):
        content = block.content
    elif block.content:
        placed: list[Placed] = [(f"{where}.content.{n}", p) for n, p in enumerate(block.content)]
        content = _content(placed, "tool_result")
    if block.is_error:
        error = "Error: "
        content = f"{error}{content}" if isinstance(content, str) else [TextPart(error), *content]
    return ConversationTurn("tool", content, call_id=block.tool_use_id)


def _assistant(blocks: Sequence[Placed]) -> ConversationTurn:
    thoughts: list[str] = []
    said: list[Placed] = []
    calls: list[TurnCall] = []
    for where, block in blocks:
        match block:
            case AnthropicThought(thinking=text, signature=signature):
                thoughts.append(text or unseal(signature) or "")
            case RedactedThought():
                pass  # Nobody but who sealed it can read it.
            case ToolUse(id=id, name=name, input=arguments):
                calls.append(TurnCall(name, arguments, id))
            case _:
                said.append((where, block))
    text = _joined(_texts(said, "assistant"))
    content = text or None if calls else text
    return ConversationTurn("assistant", content, reasoning=_joined(thoughts) or None, calls=calls)


def _texts(blocks: Iterable[Placed], role: str) -> list[str]:
    return [_text(where, block, role) for where, block in blocks]


def _text(where: str, block: Block, role: str) -> str:
    match block:
        case Text(text=text):
            return text
        case Document():
            return _document(where, block)
        case Image():
            raise BadRequest(
                f"{where}: a picture cannot stand in {_PLACES.get(role, role)}.", param=where
            )
        case _:
            kind = type(block).__struct_config__.tag
            raise BadRequest(
                f"{where}: a block of type '{kind}' cannot stand in a message of role '{role}'.",
                param=where,
            )


def _document(where: str, block: Document) -> str:
    source = block.source
    if block.citations is not None and block.citations.enabled:
        raise Unsupported(f"{where}: citations are not supported by this server.", param=where)
    if source.type == "text" and source.data is not None:
        body = source.data
    elif source.type == "content" and source.content is not None:
        content = source.content
        parts = [Text(text=content)] if isinstance(content, str) else content
        body = _joined(_text(f"{where}.source.content", part, "document") for part in parts)
    else:
        raise Unsupported(
            f"{where}: documents with a source of type '{source.type}' are not supported by this "
            "server; send their text (a source of type 'text').",
            param=where,
        )
    return _joined([block.title or "", block.context or "", body])


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)
