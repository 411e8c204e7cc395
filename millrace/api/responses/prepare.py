"""From a Responses request to a Request for the model, and the machine that will tell its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.api.body import convert, refuse, unknown
from millrace.api.openai.common import chat_logprobs, demanded, fill
from millrace.api.responses.items import Item, read_items
from millrace.api.responses.machine import Machine
from millrace.api.responses.messages import to_messages
from millrace.api.responses.owners import demand
from millrace.api.responses.schema import KNOWN, REFUSED, ConversationRef, ResponsesRequest
from millrace.api.responses.store import Store
from millrace.api.responses.tools import ChosenTools, Toolbox, choose, open_tools
from millrace.api.responses.truncation import reserve, shortest_cut
from millrace.errors import BadRequest, ContextLengthExceeded, MillraceError
from millrace.serving.model import ServedModel
from millrace.serving.registry import Registry
from millrace.serving.request import Request
from millrace.text.dialect import Conversation
from millrace.text.grammar import Demand, demand_of

_NAMES = {"effort": "reasoning.effort", "thinking": "enable_thinking"}
"""What the dialect calls the fields that a model is deaf to."""


@dataclass
class ResponsePlan:
    """A request, read and ready to run."""

    wire: ResponsesRequest
    model: ServedModel
    request: Request
    given: list[Item]
    """The request's own input, without what it goes back to."""
    box: Toolbox
    ignored: list[str]
    stored: bool

    @property
    def conversation(self) -> str | None:
        return conversation_id(self.wire)

    def machine(self, id: str) -> Machine:
        reasoning = self.wire.reasoning
        include = self.wire.include or []
        vocabulary = self.model.tokenizer.vocabulary
        return Machine(
            _echo(id, self),
            self.box.offered,
            queued=bool(self.wire.background),
            summary=bool(reasoning and (reasoning.summary or reasoning.generate_summary)),
            sealed="reasoning.encrypted_content" in include,
            scorer=(
                None
                if self.request.logprobs is None
                else lambda items: list(chat_logprobs(vocabulary, items)["content"])
            ),
        )


async def prepare(
    registry: Registry, store: Store, raw: dict[str, Any], id: str, caller: str
) -> ResponsePlan:
    """`id` is the request's own, under which it runs; the response has another."""
    wire = convert(raw, ResponsesRequest)
    refuse(raw, REFUSED)
    _agree(wire, store)
    model = registry.get(wire.model)
    before = await _before(store, wire, caller)
    given = await _resolved(store, read_items(wire.input or []), caller)
    items = before + given
    if not items:
        raise BadRequest("The input is empty.", param="input")
    box = open_tools(_all_tools(wire, items))
    chosen = choose(wire.tool_choice, box)
    work = _Work(wire, model, chosen, _demand(wire), id)
    with our_words():
        request, deaf = await asyncio.to_thread(work.request, items)
    ignored = (
        box.ignored
        + [_NAMES.get(name, name) for name in deaf]
        + _advice(wire)
        + unknown(raw, KNOWN)
    )
    if wire.store and not store.on:
        ignored.append("store")
    stored = wire.store is not False and store.on
    return ResponsePlan(wire, model, request, given, box, ignored, stored)


def conversation_id(wire: ResponsesRequest) -> str | None:
    named = wire.conversation
    return named.id if isinstance(named, ConversationRef) else named


@contextlib.contextmanager
def our_words() -> Iterator[None]:
    """The core speaks of messages where this protocol has its input."""
    try:
        yield
    except MillraceError as error:
        if error.param == "messages":
            error.param = "input"
        elif error.param is not None and error.param.startswith("response_format"):
            message = error.message.replace("response_format", "text.format")
            raise BadRequest(message, param="text.format") from error
        raise


def _agree(wire: ResponsesRequest, store: Store) -> None:
    """What contradicts itself, or needs what this server does not do."""
    if wire.previous_response_id is not None and wire.conversation is not None:
        raise BadRequest(
            "Give previous_response_id or conversation, not both.", param="conversation"
        )
    for name in ("conversation", "background"):
        if not getattr(wire, name):
            continue
        store.demand(name)
        if wire.store is False:
            raise BadRequest(f"'{name}' needs stored responses, not store: false.", param="store")


async def _before(store: Store, wire: ResponsesRequest, caller: str) -> list[Item]:
    """What the request goes back to."""
    if wire.previous_response_id is not None:
        store.demand("previous_response_id")
        demand(wire.previous_response_id, caller, "previous_response_id")
        found = await store.chain(wire.previous_response_id)
        last = await store.response(wire.previous_response_id)
        if last["status"] in ("queued", "in_progress"):
            raise BadRequest(
                f"The response '{last['id']}' is not finished.", param="previous_response_id"
            )
        if last.get("conversation"):
            raise BadRequest(
                f"The response '{last['id']}' belongs to a conversation; go on with that.",
                param="previous_response_id",
            )
        return found
    if (id := conversation_id(wire)) is not None:
        demand(id, caller)
        await store.conversation(id)
        return await store.conversation_items(id)
    return []


async def _resolved(store: Store, items: list[Item], caller: str) -> list[Item]:
    """With the items that were named in place of their names."""
    return [
        await store.item(i["id"], caller) if i["type"] == "item_reference" else i for i in items
    ]


def _all_tools(wire: ResponsesRequest, items: Sequence[Item]) -> list[Any]:
    """Those of the request, and those that its items add."""
    found = list(wire.tools or [])
    for item in items:
        if item["type"] == "additional_tools":
            found += [tool for tool in item["tools"] if tool not in found]
    return found


def _demand(wire: ResponsesRequest) -> Demand | None:
    """The form that the answer must have."""
    asked = wire.text.format if wire.text else None
    if asked is None:
        return demanded(wire)
    with our_words():
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

    def request(self, items: list[Item]) -> tuple[Request, list[str]]:
        """The request, and the fields that the model is deaf to."""
        try:
            built = self._build(items)
        except ContextLengthExceeded:
            shorter = self._shortened(items) if self.wire.truncation == "auto" else None
            if shorter is None:
                raise
            built = shorter
        assert built.chat is not None
        return built, self.model.dialect.ignored(built.chat)

    def _shortened(self, items: list[Item]) -> Request | None:
        window = self.model.window
        limit = window - reserve(window, self.wire.max_output_tokens)
        return shortest_cut(
            items, self._fitting, lambda r: r is not None and len(r.prompt) <= limit
        )

    def _fitting(self, items: Sequence[Item]) -> Request | None:
        try:
            return self._build(items)
        except ContextLengthExceeded:
            return None

    def _build(self, items: Sequence[Item]) -> Request:
        wire = self.wire
        request = self.model.chat(self.id, self._chat(items), self.demand)
        fill(request, wire, self.model)
        request.max_tokens = wire.max_output_tokens
        if wire.top_logprobs or "message.output_text.logprobs" in (wire.include or []):
            request.logprobs = wire.top_logprobs or 0
        return request

    def _chat(self, items: Sequence[Item]) -> Conversation:
        wire, reasoning = self.wire, self.wire.reasoning
        current = reasoning is not None and reasoning.context == "current_turn"
        return Conversation(
            messages=to_messages(items, wire.instructions, only_current=current),
            tools=self.chosen.functions,
            tool_choice=self.chosen.choice,
            tool_name=self.chosen.name,
            parallel=wire.parallel_tool_calls is not False,
            thinking=wire.enable_thinking,
            effort=reasoning.effort if reasoning else None,
            thinking_budget=wire.thinking_token_budget,
            template_arguments=wire.chat_template_kwargs or {},
        )


def _echo(id: str, plan: ResponsePlan) -> dict[str, Any]:
    """The response object, as far as it is known before the answer."""
    wire, sampling = plan.wire, plan.request.sampling
    reasoning, text = wire.reasoning, wire.text
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": plan.model.name,
        "background": bool(wire.background),
        "conversation": {"id": plan.conversation} if plan.conversation else None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": wire.safety_identifier,
        "service_tier": "default",
        "store": plan.stored,
        "temperature": sampling.temperature,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": wire.tool_choice or "auto",
        "tools": wire.tools or [],
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": wire.truncation or "disabled",
        "user": wire.user,
    }
