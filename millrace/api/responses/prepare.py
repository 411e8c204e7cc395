"""From a Responses request to a Request for the model, and the machine that will tell its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.api.prelude import Asked, in_words
from millrace.api.responses.history import before
from millrace.api.responses.items import Item, read_items
from millrace.api.responses.measure import Room
from millrace.api.responses.messages import to_messages
from millrace.api.responses.plan import ResponsePlan
from millrace.api.responses.schema import ResponsesRequest
from millrace.api.responses.store import Store
from millrace.api.responses.truncation import reserve, shortest_cut
from millrace.errors import BadRequest, ContextLengthExceeded
from millrace.serving.forms import demanded
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.sampling_fields import fill, sampling_fields
from millrace.serving.thinking import strange_arguments, thinking_of
from millrace.serving.toolbox import ChosenTools, choose, open_tools
from millrace.text.conversation import Conversation
from millrace.text.grammar import Demand, demand_of

HERE = {"messages": "input", "response_format": "text.format"}
"""What the core calls fields, as this protocol does."""
_NAMES = {"effort": "reasoning.effort", "thinking": "enable_thinking"}
"""What the dialect calls the fields that a model is deaf to."""


async def prepare(
    asked: Asked[ResponsesRequest], store: Store, id: str, caller: str
) -> ResponsePlan:
    """`id` is the request's own, under which it runs; the response has another."""
    wire, model = asked.wire, asked.model
    _agree(wire, store)
    given = await resolved(store, await asyncio.to_thread(read_items, wire.input or []), caller)
    with in_words(HERE):
        items = await before(
            store, wire, caller, Room(model), given, shorten=wire.truncation == "auto"
        )
    items += given
    if not items:
        raise BadRequest("The input is empty.", param="input")
    box = await asyncio.to_thread(lambda: open_tools(_all_tools(wire, items)))
    chosen = choose(wire.tool_choice, box)
    work = _Work(wire, model, chosen, _demand(wire), id)
    with in_words(HERE):
        request, deaf = await prepared(
            model.pictures, lambda: work.chat(items), lambda chat: work.request(items, chat)
        )
    ignored = [
        *box.ignored,
        *(_NAMES.get(name, name) for name in deaf),
        *_advice(wire),
        *strange_arguments(wire.chat_template_kwargs or {}, model.dialect),
        *asked.ignored,
    ]
    if wire.store and not store.on:
        ignored.append("store")
    stored = wire.store is not False and store.on
    return ResponsePlan(wire, model, request, given, box, ignored, stored)


def _agree(wire: ResponsesRequest, store: Store) -> None:
    """What contradicts itself, or needs what this server does not do."""
    if wire.previous_response_id is not None and wire.conversation is not None:
        raise BadRequest(
            "Give previous_response_id or conversation, not both.", param="conversation"
        )
    for name in ("conversation", "background"):
        if getattr(wire, name):
            store.demand(name)
    if wire.background and wire.store is False:
        raise BadRequest("'background' needs stored responses, not store: false.", param="store")


async def resolved(store: Store, items: list[Item], caller: str) -> list[Item]:
    """With the items that were named in place of their names."""
    return [
        await store.item(i["id"], caller) if i["type"] == "item_reference" else i for i in items
    ]


def _all_tools(wire: ResponsesRequest, items: Sequence[Item]) -> list[Any]:
    """Those of the request, and those that its items add."""
    found = list(wire.tools or [])
    known = set(map(_spelled, found))
    for item in items:
        for tool in item["tools"] if item["type"] == "additional_tools" else ():
            if (spelled := _spelled(tool)) not in known:
                known.add(spelled)
                found.append(tool)
    return found


def _spelled(tool: Any) -> bytes:
    """The same for equal tools, whatever the order of their fields."""
    return msgspec.json.encode(tool, order="sorted")


def _demand(wire: ResponsesRequest) -> Demand | None:
    """The form that the answer must have."""
    asked = wire.text.format if wire.text else None
    if asked is None:
        return demanded(wire)
    with in_words(HERE):
        found = demand_of({"response_format": asked})
    other = demanded(wire)
    if found is not None and other is not None:
        raise BadRequest("Give text.format or a guided_* field, not both.", param="text.format")
    return found or other


def _advice(wire: ResponsesRequest) -> list[str]:
    """Advice that no model here can take, where it asks for something."""
    found = []
    if wire.text and wire.text.verbosity in ("low", "high"):
        found.append("text.verbosity")
    if wire.reasoning and wire.reasoning.context == "all_turns":
        found.append("reasoning.context")
    if wire.reasoning and wire.reasoning.mode not in (None, "standard"):
        found.append("reasoning.mode")
    return found


@dataclass
class _Work:
    """Rendering and tokenising, which is not for the event loop."""

    wire: ResponsesRequest
    model: ServedModel
    chosen: ChosenTools
    demand: Demand | None
    id: str

    def request(self, items: list[Item], chat: Conversation) -> tuple[Request, list[str]]:
        """The request, and the fields that the model is deaf to; `chat` is that of all items."""
        try:
            built = self._build(chat)
        except ContextLengthExceeded:
            shorter = self._shortened(items, chat) if self.wire.truncation == "auto" else None
            if shorter is None:
                raise
            built = shorter
        assert built.chat is not None
        return built, self.model.dialect.ignored(built.chat)

    def _shortened(self, items: list[Item], whole: Conversation) -> Request | None:
        window = self.model.window
        limit = window - reserve(window, self.wire.max_output_tokens)

        def fitting(kept: Sequence[Item]) -> Request | None:
            chat = self.chat(kept)
            chat.adopt(whole)
            try:
                return self._build(chat)
            except ContextLengthExceeded:
                return None

        return shortest_cut(items, fitting, lambda r: r is not None and len(r.prompt) <= limit)

    def _build(self, chat: Conversation) -> Request:
        wire = self.wire
        request = self.model.chat(self.id, chat, self.demand)
        fill(request, sampling_fields(wire, max_tokens="max_output_tokens"), self.model)
        if wire.top_logprobs or "message.output_text.logprobs" in (wire.include or []):
            request.logprobs = wire.top_logprobs or 0
        return request

    def chat(self, items: Sequence[Item]) -> Conversation:
        wire, reasoning = self.wire, self.wire.reasoning
        thinking = thinking_of(wire)
        current = reasoning is not None and reasoning.context == "current_turn"
        return Conversation(
            messages=to_messages(items, wire.instructions, only_current=current),
            tools=self.chosen.functions,
            tool_choice=self.chosen.choice,
            tool_name=self.chosen.name,
            parallel=wire.parallel_tool_calls is not False,
            thinking=thinking.wanted,
            effort=reasoning.effort if reasoning else None,
            thinking_budget=thinking.budget,
            template_arguments=wire.chat_template_kwargs or {},
        )
