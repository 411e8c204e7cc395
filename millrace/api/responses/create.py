"""POST /v1/responses and POST /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, whole
from millrace.api.context import caller_of, context_of, request_id
from millrace.api.openapi.describe import READS, RUNS, SSE, describe
from millrace.api.prelude import Border, ignored_header, in_words
from millrace.api.responses.answering import Answering, encode
from millrace.api.responses.answers import InputTokens, ResponseEvent, ResponseObject
from millrace.api.responses.ids import fresh
from millrace.api.responses.parts import Wire
from millrace.api.responses.plan import ResponsePlan
from millrace.api.responses.prepare import HERE, prepare
from millrace.api.responses.schema import LABELS, REFUSED, ResponsesRequest
from millrace.api.responses.store import Store
from millrace.api.running import run
from millrace.errors import MillraceError
from millrace.serving.running import Running

router = APIRouter()
_BORDER = Border(ResponsesRequest, REFUSED, LABELS)
_COUNTING = Border(ResponsesRequest, REFUSED, LABELS, loads=False)


@router.post("/v1/responses")
@describe(
    "responses",
    "Make a response",
    body=ResponsesRequest,
    answer=ResponseObject,
    stream=SSE,
    event=ResponseEvent,
    statuses=RUNS,
)
async def create(http: HttpRequest) -> Response:
    context, caller = context_of(http), caller_of(http)
    asked = await _BORDER.read(http)
    id = fresh("resp_", caller)
    name = request_id(http, "") if "x-request-id" in http.headers else id
    plan = await prepare(asked, context.store, name, caller)
    if plan.storing:
        await context.store.check_room(caller, plan.stored_bytes)
    headers = {"x-request-id": name} | ignored_header(plan.ignored)
    with in_words(HERE):
        running = run(http, plan.model, plan.request)
    if plan.wire.background:
        job = await context.jobs.start(id, plan, running, context.store)
        if not plan.wire.stream:
            return as_json(job.response(), headers)
        follow = job.follow(0, context.config.keep_alive)
        return EventStream(follow, _stay, _nothing, headers)
    answering = _answering(id, plan, running, context.store)
    if plan.wire.stream:
        return EventStream(answering.stream(), running.close, _broken(answering), headers)
    machine = await whole(http, answering.whole(), running.close)
    if machine.store_error is not None:
        headers |= ignored_header([*plan.ignored, *plan.storing])
    return as_json(machine.response(), headers)


@router.post("/v1/responses/input_tokens")
@describe(
    "responses",
    "Count a request's tokens",
    body=ResponsesRequest,
    answer=InputTokens,
    statuses=(*READS, 404),
)
async def input_tokens(http: HttpRequest) -> Response:
    """How long the prompt of a request would be, template and tools included."""
    asked = await _COUNTING.read(http)
    plan = await prepare(asked, context_of(http).store, fresh("resp_"), caller_of(http))
    count = {"object": "response.input_tokens", "input_tokens": len(plan.request.prompt)}
    return as_json(count, ignored_header(plan.ignored))


def _answering(id: str, plan: ResponsePlan, running: Running, store: Store) -> Answering:
    machine = plan.machine(id)

    async def save(last: list[Wire]) -> None:
        named = None if machine.error else plan.conversation
        if plan.stored:
            await store.put(machine.response(), plan.given, conversation=named)
        elif named is not None:
            await store.extend_conversation(named, plan.given + machine.response()["output"])

    return Answering(machine, running, save)


def _broken(answering: Answering) -> Any:
    def tell(error: MillraceError) -> bytes:
        return b"".join(map(encode, answering.machine.fail(error)))

    return tell


def _stay() -> None:
    """The client has gone; a background response goes on."""


def _nothing(error: MillraceError) -> bytes:
    return b""
