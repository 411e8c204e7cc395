"""Sending an answer: as server-sent events while it is made, or whole, and letting go of the
request the moment nobody listens any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from millrace.errors import Cancelled, MillraceError, RequestFailed

log = logging.getLogger("millrace.api")
T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


_BREAKS = {b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029", b"\xc2\x85": rb"\u0085"}
"""Characters at which some clients split lines, although no stream protocol says so."""


def one_line(value: Any) -> bytes:
    """JSON that no client takes for several lines."""
    text = msgspec.json.encode(value)
    if not text.isascii():
        for raw, escaped in _BREAKS.items():
            text = text.replace(raw, escaped)
    return text


def data(value: Any) -> bytes:
    return b"data: " + one_line(value) + b"\n\n"


def as_json(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value), media_type="application/json", headers=dict(headers or {})
    )


class EventStream(StreamingResponse):
    """A stream of bytes that closes what it reads from, even if it never came to read."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], None],
        on_error: Callable[[MillraceError], bytes],
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        self._close = close
        super().__init__(
            _guard(chunks, on_error),
            media_type=media_type,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _guard(
    chunks: AsyncIterator[bytes], on_error: Callable[[MillraceError], bytes]
) -> AsyncIterator[bytes]:
    """An error in the middle is an event of its own, never a quiet end."""
    try:
        async for chunk in chunks:
            yield chunk
    except MillraceError as error:
        yield on_error(error)
    except Exception:
        log.exception("a stream broke")
        yield on_error(RequestFailed("The server met an unexpected error in this stream."))


async def whole(request: Request, work: Awaitable[T], close: Callable[[], None]) -> T:
    """Wait for a whole answer, and stop working on it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("The client closed the connection.")
    finally:
        gone.cancel()
        task.cancel()
        close()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
