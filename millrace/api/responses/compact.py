"""POST /v1/responses/compact: a long conversation as a short one, by the model's own summary.

What comes back are the user's messages as they were, and one item that holds the summary in sealed
form; sent as input, it stands for all that was left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json, whole
from millrace.api.context import caller_of, context_of, request_id
from millrace.api.encrypted_content import seal
from millrace.api.openapi.describe import RUNS, describe
from millrace.api.prelude import Border, in_words
from millrace.api.responses.answers import Compaction
from millrace.api.responses.history import before
from millrace.api.responses.ids import fresh, item_id
from millrace.api.responses.items import Item, read_items
from millrace.api.responses.machine import usage_of
from millrace.api.responses.measure import Room
from millrace.api.responses.messages import to_messages
from millrace.api.responses.prepare import HERE, resolved
from millrace.api.responses.schema import LABELS, CompactRequest
from millrace.api.responses.truncation import reserve, shortest_cut
from millrace.api.running import run
from millrace.errors import BadRequest, ContextLengthExceeded
from millrace.serving.fold import fold
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.sampling_fields import SamplingFields, fill
from millrace.text.conversation import Conversation, ConversationTurn

router = APIRouter()
_BORDER = Border(CompactRequest, advisory=LABELS)
_TASK = (
    "Summarise our conversation so far, so that you could go on with it from your summary alone: "
    "what I asked for, what was found and decided, what was done and what is left to do. Keep "
    "names, numbers, paths and code as they are. Write the summary and nothing else."
)


@router.post("/v1/responses/compact")
@describe(
    "responses",
    "Make a conversation shorter",
    body=CompactRequest,
    answer=Compaction,
    statuses=RUNS,
)
async def compact(http: HttpRequest) -> Response:
    asked = await _BORDER.read(http)
    wire, model, store, caller = asked.wire, asked.model, context_of(http).store, caller_of(http)
    if wire.previous_response_id is not None and wire.conversation is not None:
        raise BadRequest(
            "Give previous_response_id or conversation, not both.", param="conversation"
        )
    given = await resolved(store, await asyncio.to_thread(read_items, wire.input or []), caller)
    with in_words(HERE):
        items = await before(store, wire, caller, Room(model), given, shorten=True)
    items += given
    if not items:
        raise BadRequest("The input is empty.", param="input")
    id = request_id(http, "resp_")
    with in_words(HERE):
        request = await prepared(
            model.pictures,
            lambda: _chat(items, wire.instructions),
            lambda chat: _request(id, model, items, wire.instructions, chat),
        )
        running = run(http, model, request)
    answers, usage = await whole(http, fold(running.events(), running.n), running.close)
    summary = {
        "id": item_id("compaction"),
        "type": "compaction",
        "encrypted_content": seal(answers[0].content.strip()),
    }
    body: dict[str, Any] = {
        "id": fresh("resp_", caller),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*(i for i in items if i.get("role") == "user"), summary],
        "usage": usage_of(usage),
    }
    return as_json(body, asked.headers(id))


def _chat(items: Sequence[Item], instructions: str | None) -> Conversation:
    messages = [*to_messages(items, instructions), ConversationTurn("user", _TASK)]
    return Conversation(messages=messages, thinking=False)


def _request(
    id: str,
    model: ServedModel,
    items: Sequence[Item],
    instructions: str | None,
    whole: Conversation,
) -> Request:
    """A conversation that has no room with the task behind it is cut from its beginning."""
    room = reserve(model.window, None)

    def built(kept: Sequence[Item]) -> Request | None:
        chat = _chat(kept, instructions)
        chat.adopt(whole)
        try:
            return model.chat(id, chat)
        except ContextLengthExceeded:
            return None

    def fits(request: Request | None) -> bool:
        return request is not None and len(request.prompt) + room <= model.window

    request = built(items)
    if not fits(request):
        request = shortest_cut(items, built, fits) or request
    if request is None:
        # Not one item of it has room: the model says how long it is.
        request = model.chat(id, whole)
    return fill(request, SamplingFields(max_tokens=room), model)
