"""Our errors as gRPC's status codes, in one table, and the wrapping that answers with them.

A handler raises what is wrong; nothing else in the fronts ends a call with a status by itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc

from millrace.errors import BadRequest, MillraceError, RequestFailed

log = logging.getLogger("millrace.rpc")
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_LONGEST = 2000
"""Characters of a status message: it travels in a header, whose size clients bound."""


GARBLED = object()
"""Stands for what came and is no message (`decoding`)."""


def code_of(error: MillraceError) -> grpc.StatusCode:
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def text_of(error: MillraceError) -> str:
    text = error.message.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


async def refuse(context: Any, error: MillraceError) -> NoReturn:
    """End the call with the error's status."""
    await context.abort(code_of(error), text_of(error))
    raise AssertionError("a call goes on that was ended")


def unary(handler: Unary) -> Unary:
    """A handler of one answer, whose errors become statuses."""

    @functools.wraps(handler)
    async def answered(request: Any, context: Any) -> Any:
        async with _told(request, context):
            return await handler(request, context)

    return answered


def stream(handler: Stream) -> Stream:
    """The same for a handler of many answers."""

    @functools.wraps(handler)
    async def answered(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _told(request, context):
            made = cast(AsyncGenerator[Any, None], handler(request, context))
            async with contextlib.aclosing(made) as answers:
                async for answer in answers:
                    yield answer

    return answered


@contextlib.asynccontextmanager
async def _told(request: Any, context: Any) -> AsyncIterator[None]:
    """What is wrong with a call, or goes wrong in it, is told as its status."""
    try:
        if request is GARBLED:
            raise BadRequest("What came is no message of this method.")
        yield
    except MillraceError as error:
        await refuse(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # whatever breaks one call leaves the server as it was
        await refuse(context, _unexpected(error))


def _unexpected(error: Exception) -> RequestFailed:
    log.error("a call broke", exc_info=error)
    return RequestFailed(f"The server met an unexpected error: {type(error).__name__}.")
