"""What chat offers the model to call, in each of OpenAI's ways, as plain functions and back again.

Functions of today, `functions` of old, and custom tools that take free text: the model sees
functions, and what it calls is told to the client in the client's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.api.freeform import InputText
from millrace.api.openai.schema import (
    AllowedTools,
    ChatRequest,
    NamedCustom,
    NamedFunction,
    ToolWish,
)
from millrace.errors import BadRequest
from millrace.serving.toolbox import Toolbox, check_tools, choose, flat_tool, open_tools
from millrace.text.conversation import ToolChoice


@dataclass(frozen=True)
class Offer:
    functions: list[dict[str, Any]] = field(default_factory=list)
    choice: ToolChoice = "auto"
    name: str | None = None
    """The one function that must be called."""
    custom: frozenset[str] = frozenset()
    """The names of those that take free text."""
    legacy: bool = False
    """The client speaks of `functions`, and hears `function_call`."""
    ignored: tuple[str, ...] = ()


def offer_of(wire: ChatRequest) -> Offer:
    legacy = bool(wire.functions) or wire.function_call is not None
    if not legacy:
        return offered(wire.tools or (), wire.tool_choice)
    if wire.tools or wire.tool_choice is not None:
        raise BadRequest(
            "Give 'tools' and 'tool_choice', or the older 'functions' and 'function_call', not "
            "both.",
            param="functions",
        )
    box = open_tools([{**f, "type": "function"} for f in wire.functions or ()])
    call = wire.function_call
    named = None if call is None or isinstance(call, str) else call.name
    return _offer(box, {"type": "function", "name": named} if named else call, True)


def offered(tools: Sequence[Mapping[str, Any]], choice: ToolWish | None) -> Offer:
    """What tools in chat's shape and a choice among them come to."""
    check_tools(len(tools))
    box = open_tools([flat_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)])
    return _offer(box, _flat_choice(choice), False)


def _offer(box: Toolbox, wanted: Any, legacy: bool) -> Offer:
    chosen = choose(wanted, box)
    return Offer(
        functions=chosen.functions,
        choice=chosen.choice,
        name=chosen.name,
        custom=frozenset(name for name, o in box.offered.items() if o.kind == "custom"),
        legacy=legacy,
        ignored=tuple(box.ignored),
    )


def _flat_choice(choice: ToolWish | None) -> Any:
    match choice:
        case NamedFunction(function=tool):
            return {"type": "function", "name": tool.name}
        case NamedCustom(custom=tool):
            return {"type": "custom", "name": tool.name}
        case AllowedTools(allowed_tools=allowed):
            check_tools(len(allowed.tools), "tool_choice.allowed_tools")
            tools = [flat_tool("tool_choice.allowed_tools", t) for t in allowed.tools]
            return {"type": "allowed_tools", "mode": allowed.mode, "tools": tools}
        case _:
            return choice


def spoken(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation so far, with every call and result in the form of functions."""
    found: list[dict[str, Any]] = []
    answering: dict[str, str] = {}
    """The id of the last call of old, by the name of its function."""
    for at, message in enumerate(messages):
        copy = dict(message)
        call = copy.pop("function_call", None)
        if call and not copy.get("tool_calls"):
            name = call["name"]
            answering[name] = f"call_{at}"
            function = {"name": name, "arguments": call.get("arguments", "{}")}
            copy["tool_calls"] = [{"id": answering[name], "type": "function", "function": function}]
        elif copy.get("tool_calls"):
            copy["tool_calls"] = [_as_function(c) for c in copy["tool_calls"]]
        if copy.get("role") == "function" and copy.get("name") in answering:
            copy.setdefault("tool_call_id", answering[copy["name"]])
        found.append(copy)
    return found


def _as_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, Mapping):
        return call
    arguments = json.dumps({"input": custom.get("input", "")}, ensure_ascii=False)
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


class Calls:
    """The calls of one choice, as they go out on the wire piece by piece."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._custom: dict[int, tuple[InputText, list[str]]] = {}

    def start(self, index: int, id: str, name: str) -> dict[str, Any]:
        if self._offer.legacy:
            return {"function_call": {"name": name, "arguments": ""}}
        head: dict[str, Any] = {"index": index, "id": id}
        if name in self._offer.custom:
            self._custom[index] = (InputText(), [])
            head |= {"type": "custom", "custom": {"name": name, "input": ""}}
        else:
            head |= {"type": "function", "function": {"name": name, "arguments": ""}}
        return {"tool_calls": [head]}

    def piece(self, index: int, text: str) -> dict[str, Any]:
        if self._offer.legacy:
            return {"function_call": {"arguments": text}}
        if index not in self._custom:
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        reader, raw = self._custom[index]
        raw.append(text)
        return _input(index, reader.feed(text))

    def rest(self) -> list[dict[str, Any]]:
        """Arguments that turned out not to hold the one text, given as they are."""
        return [
            _input(index, "".join(raw))
            for index, (reader, raw) in self._custom.items()
            if not reader.found and raw
        ]

    def whole(self, id: str, name: str, arguments: str) -> dict[str, Any]:
        """A call of a whole answer, as `tool_calls` lists it."""
        if name not in self._offer.custom:
            function = {"name": name, "arguments": arguments}
            return {"id": id, "type": "function", "function": function}
        reader = InputText()
        text = reader.feed(arguments)
        custom = {"name": name, "input": text if reader.found else arguments}
        return {"id": id, "type": "custom", "custom": custom}


def _input(index: int, text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
