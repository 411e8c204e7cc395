"""How a call is read and how it ends, for every method of every service alike.

What comes is read here and not by gRPC, which would answer that it does not know what happened: what is
no message is refused like anything else, and a large one is read on a thread. Handlers raise what is
wrong; nothing else ends a call with a status, but a reader who takes nothing for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millrace.errors import BadRequest, Cancelled, MillraceError, RequestFailed
from millrace.rpc.arrivals import Arrival, MessageArrivals
from millrace.rpc.status import refuse

log = logging.getLogger("millrace.rpc")
Read = Callable[[bytes], Any]
_LARGE = 1 << 20
"""Bytes of a message beyond which it is read on a thread."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, reader_timeout: float, arrivals: MessageArrivals | None = None) -> None:
        """`reader_timeout` is how many seconds a caller may leave one message of a stream unread."""
        self._patience = reader_timeout
        self._arrivals = arrivals or MessageArrivals()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        try:
            arrival = await self._arrivals.begin()
        except MillraceError as error:
            return refusal(error)
        read = handler.request_deserializer
        if handler.response_streaming:
            made = _stream(handler.unary_stream, read, self._patience, arrival)
            return handler._replace(request_deserializer=None, unary_stream=made)
        one = _unary(handler.unary_unary, read, arrival)
        return handler._replace(request_deserializer=None, unary_unary=one)


def refusal(error: MillraceError) -> Any:
    """A handler that ends a call before its message is read, as only one of a stream of messages can."""

    async def refused(messages: Any, context: Any) -> Any:
        await refuse(context, error)

    return grpc.stream_unary_rpc_method_handler(refused)


def _unary(handler: Callable[..., Awaitable[Any]], read: Read | None, arrival: Arrival) -> Any:
    async def answered(raw: bytes, context: Any) -> Any:
        arrival.complete()
        async with _told(context):
            return await handler(await _message(raw, read), context)

    return answered


def _stream(
    handler: Callable[..., AsyncGenerator[Any, None]],
    read: Read | None,
    patience: float,
    arrival: Arrival,
) -> Any:
    async def answered(raw: bytes, context: Any) -> AsyncIterator[Any]:
        arrival.complete()
        async with _told(context):
            message = await _message(raw, read)
            with _Reader(patience, context) as reader:
                async with contextlib.aclosing(handler(message, context)) as answers:
                    async for answer in answers:
                        reader.given()
                        yield answer
                        reader.took()

    return answered


async def _message(raw: bytes, read: Read | None) -> Any:
    if read is None:
        return raw
    try:
        return await asyncio.to_thread(read, raw) if len(raw) > _LARGE else read(raw)
    except DecodeError:
        raise BadRequest("What came is no message of this method.") from None


class _Reader:
    """Ends a call whose caller takes no message for so long: what it holds is others' to use."""

    def __init__(self, patience: float, context: Any) -> None:
        self._context = context
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._since: float | None = None
        self._timer = self._loop.call_later(patience, self._look)
        self._ending: asyncio.Task[None] | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def given(self) -> None:
        self._since = self._loop.time()

    def took(self) -> None:
        self._since = None

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited < self._patience:
            self._timer = self._loop.call_later(self._patience - waited, self._look)
        else:
            log.info("a caller has not read for %g s; its call ends", self._patience)
            self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        """What waits to be read stays before the status; the handler does not wait for either."""
        self._loop.call_soon(self._task.cancel)
        with contextlib.suppress(grpc.aio.AbortError):
            await refuse(self._context, Cancelled(f"Nothing was read for {self._patience:g} s."))


@contextlib.asynccontextmanager
async def _told(context: Any) -> AsyncIterator[None]:
    """What is wrong with a call, or goes wrong in it, is told as its status."""
    try:
        yield
    except MillraceError as error:
        await refuse(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # whatever breaks one call leaves the server as it was
        log.error("a call broke", exc_info=error)
        text = f"The server met an unexpected error: {type(error).__name__}."
        await refuse(context, RequestFailed(text))
