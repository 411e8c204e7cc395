"""Our errors as gRPC's status codes, in one table."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from millrace.errors import MillraceError

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


def code_of(error: MillraceError) -> grpc.StatusCode:
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def text_of(error: MillraceError) -> str:
    text = error.message.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


async def refuse(context: Any, error: MillraceError) -> NoReturn:
    """End the call with the error's status."""
    await context.abort(code_of(error), text_of(error))
    raise AssertionError("a call goes on that was ended")
