"""Reading request bodies: bounded, JSON, checked against a type; faults are refused with a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from millrace.api.body_budget import SMALL
from millrace.api.context import context_of
from millrace.api.decoding import LARGE, decode_large
from millrace.errors import (
    BadRequest,
    Overloaded,
    RequestTooLarge,
    Unsupported,
    UnsupportedEncoding,
)

T = TypeVar("T")
DEEPEST = 128
"""Levels of lists and objects in a body: templates, schemas and encoders walk them by recursion."""
MOST_FIELDS = 1024
"""Fields of a body, and of its extra_body: those that are not known are named in the response."""
READ_AND_DROPPED = 64
"""How many times the limit is read of a body that is too large, so that its client reads the answer."""
_DISCARD_SECONDS = 1.0
"""For which the rest of a refused body is read and dropped."""
_LONGEST_CODING = 100
_PATH = re.compile(r" - at `\$\.?(.*)`$")


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body. The model that it asks for is noted for the log."""
    try:
        async with _read(request, limit) as body:
            value = await _decoded(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    check_fields(value, "The body")
    request.state.asked_model = value.get("model")
    return value


async def _decoded(body: bytearray) -> Any:
    if len(body) < LARGE:
        # Few brackets, few levels: a list of a million tokens need not be walked through.
        return _bounded(msgspec.json.decode(body), body.count(b"[") + body.count(b"{"))
    return await asyncio.to_thread(lambda: _bounded(*decode_large(body)))


def check_fields(value: Mapping[str, Any], name: str, param: str | None = None) -> None:
    """Refuse an object with more fields than any request has."""
    if len(value) > MOST_FIELDS:
        raise BadRequest(f"{name} has {len(value)} fields; it may have {MOST_FIELDS}.", param=param)


def _bounded(value: Any, containers: int) -> Any:
    """The value, if it has no more levels than a body may have."""
    if containers > DEEPEST and _depth(value) > DEEPEST:
        raise BadRequest(f"The body is nested too deeply: it may have {DEEPEST} levels.")
    return value


def _depth(value: Any) -> int:
    """How many levels of lists and objects there are, one beyond the allowed ones at most."""
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        depth += 1
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return depth


async def _check_encoding(request: Request) -> None:
    """Refuse a body in a coding: it would be decoded as if it were plain JSON."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip()
    if coding and coding.lower() != "identity":
        await _discard(request)
        raise UnsupportedEncoding(coding[:_LONGEST_CODING])


@contextlib.asynccontextmanager
async def _read(request: Request, limit: int) -> AsyncIterator[bytearray]:
    """The body, whose bytes are reserved in the server's budget until the block ends."""
    await _check_encoding(request)
    declared = request.headers.get("content-length")
    too_large = declared is not None and int(declared) > limit
    if too_large and (_waits_to_send(request) or int(declared or 0) > READ_AND_DROPPED * limit):
        request.state.body_unread = True
        raise _too_large(limit)
    async with contextlib.AsyncExitStack() as reservation:
        budget = context_of(request).bodies
        try:
            if declared is not None and not too_large:
                await reservation.enter_async_context(budget.reserved(int(declared)))
            body = bytearray()
            size = 0
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    too_large = True
                if too_large:
                    # Discarded: many clients read the response only after they have sent everything.
                    body.clear()
                    if size > READ_AND_DROPPED * limit:
                        request.state.body_unread = True
                        break
                    continue
                if declared is None and size > SMALL >= size - len(chunk):
                    # Its length is unknown; it may become as large as any body.
                    await reservation.enter_async_context(budget.reserved(limit))
                body += chunk
                request.state.body_bytes = size
        except Overloaded:
            await _discard(request)
            raise
        if too_large:
            raise _too_large(limit)
        yield body


async def _discard(request: Request) -> None:
    """Read and drop the rest of a refused body for a moment, so that the client reads the response.

    A connection whose body is not read to its end is closed after the response.
    """
    request.state.body_unread = True
    if _waits_to_send(request):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for _ in request.stream():
                pass
            request.state.body_unread = False


def _waits_to_send(request: Request) -> bool:
    """Whether the client sends its body only after it is told to go on."""
    is_1_1 = request.scope.get("http_version") == "1.1"
    return is_1_1 and "100-continue" in request.headers.get("expect", "").lower()


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"The body is larger than {limit} bytes, the limit of this server (--max-body)."
    )


def convert(raw: Mapping[str, Any], type: type[T]) -> T:
    """The body as a typed struct; the error names the field."""
    try:
        return msgspec.convert(raw, type)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _PATH.search(text)
        param = match[1] if match else None
        message = text[: match.start()] if match else text
        raise BadRequest(f"{param or 'body'}: {message}.", param=param) from error


def read_query(request: Request, type: type[T]) -> T:
    """The query parameters as a typed struct; texts become numbers where the struct has numbers."""
    try:
        return msgspec.convert(dict(request.query_params), type, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}.", param="query") from None


def refuse(raw: Mapping[str, Any], neutral: Mapping[str, Collection[Any]]) -> None:
    """Refuse fields that would change the answer and are not honoured, unless they ask for nothing.

    `neutral` maps each such field to the values that mean the same as leaving it out.
    """
    for name, harmless in neutral.items():
        value = raw.get(name)
        if value is None or any(value == h and type(value) is type(h) for h in harmless):
            continue
        raise Unsupported(f"'{name}' is not supported by this server yet.", param=name)


def unknown(raw: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Fields that nobody here has heard of; the response names them in a header."""
    return sorted(name for name in raw if name not in known)
