"""From items to the messages of a conversation: what belongs to one turn of the assistant is one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace.api.encrypted_content import unseal
from millrace.api.responses.items import Item
from millrace.errors import BadRequest
from millrace.serving.toolbox import flat_name
from millrace.text.conversation import ConversationTurn, ImagePart, Part, TextPart, TurnCall


def to_messages(
    items: Sequence[Item], instructions: str | None, *, only_current: bool = False
) -> list[ConversationTurn]:
    """`only_current` leaves out what was thought before the last user message."""
    writer = _Writer()
    if instructions:
        writer.messages.append(ConversationTurn("system", instructions))
    users = (at for at, item in enumerate(items) if item.get("role") == "user")
    current = max(users, default=-1) if only_current else -1
    for at, item in enumerate(items):
        if item["type"] == "reasoning" and at < current:
            continue
        writer.add(item)
    writer.flush()
    return writer.messages


class _Writer:
    def __init__(self) -> None:
        self.messages: list[ConversationTurn] = []
        self._turn: ConversationTurn | None = None
        """The assistant's turn that is being put together."""
        self._said: list[str] = []
        self._thoughts: list[str] = []
        """The pieces of its content and of its reasoning."""
        self._called: set[str] = set()

    def add(self, item: Item) -> None:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                self._say(item)
            case "message":
                self.flush()
                self.messages.append(ConversationTurn(item["role"], _parts(item["content"])))
            case "reasoning":
                self._think(thought_of(item))
            case "compaction":
                self.flush()
                summary = unseal(item["encrypted_content"]) or ""
                told = f"Summary of the conversation so far:\n{summary}"
                self.messages.append(ConversationTurn("user", told))
            case "function_call" | "custom_tool_call":
                self._call(item)
            case "function_call_output" | "custom_tool_call_output":
                self._answer(item)

    def flush(self) -> None:
        turn, self._turn = self._turn, None
        # A thought that nothing came of is no turn: it belongs to a cut-off answer.
        if turn is not None and (self._said or turn.calls):
            turn.content = "".join(self._said) if self._said else None
            turn.reasoning = "\n\n".join(self._thoughts) or None
            self.messages.append(turn)
        self._said, self._thoughts = [], []

    def _open(self) -> ConversationTurn:
        if self._turn is None:
            self._turn = ConversationTurn("assistant", None)
        return self._turn

    def _say(self, item: Item) -> None:
        text = "".join(p.get("text") or p.get("refusal") or "" for p in item["content"])
        if self._turn and self._said and not self._turn.calls:
            self.flush()
        self._open()
        self._said.append(text)

    def _think(self, thought: str) -> None:
        if self._turn and (self._said or self._turn.calls):
            self.flush()
        self._open()
        if thought or self._thoughts:
            self._thoughts.append(thought)

    def _call(self, item: Item) -> None:
        if item.get("status") == "incomplete":
            return
        custom = item["type"] == "custom_tool_call"
        arguments = json.dumps({"input": item["input"]}) if custom else item["arguments"]
        name = flat_name(item.get("namespace"), item["name"])
        self._called.add(item["call_id"])
        self._open().calls.append(TurnCall(name, arguments, item["call_id"]))

    def _answer(self, item: Item) -> None:
        self.flush()
        if item["call_id"] not in self._called:
            raise BadRequest(
                f"There is no tool call with the call_id '{item['call_id']}' before its output.",
                param="input",
            )
        output = item["output"]
        content = output if isinstance(output, str) else _parts(output)
        self.messages.append(ConversationTurn("tool", content, call_id=item["call_id"]))


def _parts(parts: Sequence[Item]) -> str | list[Part]:
    found = [_part(p) for p in parts]
    if len(found) == 1 and isinstance(found[0], TextPart):
        return found[0].text
    return found


def _part(part: Item) -> Part:
    if part["type"] == "input_image":
        return ImagePart(part["image_url"], part.get("detail") == "low", "input")
    return TextPart(part["text"] if "text" in part else part["refusal"])


def thought_of(item: Item) -> str:
    """The words of a reasoning item, from wherever they are whole."""
    sealed = item.get("encrypted_content")
    if sealed and (thought := unseal(sealed)) is not None:
        return thought
    parts = item.get("content") or item["summary"]
    return "\n\n".join(p["text"] for p in parts)
