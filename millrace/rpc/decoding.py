"""Messages that are none: handed on as such, to be refused in the protocol's words.

gRPC itself would answer that it does not know what happened, and fill the log with where it did.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millrace.rpc.status import GARBLED


class Decoding(grpc.aio.ServerInterceptor):
    """For handlers that are wrapped by `status.unary` and `status.stream`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode = handler.request_deserializer

        def decoded(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError:
                return GARBLED

        return handler._replace(request_deserializer=decoded)
