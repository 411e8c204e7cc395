"""A Responses request that was read and can be run: what it asks for, and how its answer is told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.api.logprobs import chat_logprobs
from millrace.api.responses.items import Item
from millrace.api.responses.machine import Machine
from millrace.api.responses.schema import CompactRequest, ConversationRef, ResponsesRequest
from millrace.api.responses.tables import ROW_BYTES
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.serving.toolbox import Toolbox


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

    @property
    def storing(self) -> list[str]:
        """The fields of the request, also by default, for which something is stored."""
        return ["store"] * self.stored + ["conversation"] * (self.conversation is not None)

    def stored_bytes(self) -> int:
        """What will be stored, as far as it is known before the answer."""
        items = sum(len(msgspec.json.encode(item)) + ROW_BYTES for item in self.given)
        if not self.stored:
            return items
        size = len(msgspec.json.encode(_echo("", self))) + ROW_BYTES
        return size + items * (2 if self.conversation else 1)

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


def conversation_id(wire: ResponsesRequest | CompactRequest) -> str | None:
    named = wire.conversation
    return named.id if isinstance(named, ConversationRef) else named


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
