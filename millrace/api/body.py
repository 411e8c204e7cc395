"""Reading request bodies: bounded, JSON, checked against a type; every fault a clear 400 or 413."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from millrace.api.decoding import LARGE, decode_large
from millrace.errors import BadRequest, RequestTooLarge, Unsupported

T = TypeVar("T")
DEEPEST = 128
"""Levels of lists and objects in a body: templates, schemas and encoders walk them by recursion."""
MOST_FIELDS = 1024
"""Fields of a body, and of its extra_body: those that are not known are named in the response."""
_PATH = re.compile(r" - at `\$\.?(.*)`$")


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body. The model that it asks for is noted for the log."""
    body = await _read(request, limit)
    try:
        if len(body) < LARGE:
            # Few brackets, few levels: a list of a million tokens need not be walked through.
            value = _bounded(msgspec.json.decode(body), body.count(b"[") + body.count(b"{"))
        else:
            value = await asyncio.to_thread(lambda: _bounded(*decode_large(body)))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    check_fields(value, "The body")
    request.state.asked_model = value.get("model")
    return value


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


async def _read(request: Request, limit: int) -> bytes:
    if _waits_to_send(request) and int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        # The rest is read and thrown away: a client that is still sending does not hear an answer.
        if size <= limit:
            chunks.append(chunk)
        elif size > 64 * limit:
            break
    if size > limit:
        raise _too_large(limit)
    return b"".join(chunks)


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
