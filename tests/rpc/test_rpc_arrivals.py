"""Calls whose request message does not become complete are limited in number and in time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from conftest import PATIENCE

from millrace.caller import current_caller
from millrace.rpc.arrivals import MessageArrivals
from millrace.rpc.server import listen, make_server

METHOD, STREAMED = "/test.Echo/One", "/test.Echo/Many"


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        if details.method == STREAMED:
            return grpc.unary_stream_rpc_method_handler(self._many)
        return grpc.unary_unary_rpc_method_handler(self._one)

    async def _one(self, message: bytes, context: Any) -> bytes:
        return message

    async def _many(self, message: bytes, context: Any) -> Any:
        yield message


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return (
        struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data
    )


def _text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


def half_sent(port: int, method: str, key: str = "") -> socket.socket:
    """A connection with one call that has sent 5 of the 1,000 bytes of its message."""
    head = b"\x83\x86\x04" + _text(method.encode()) + b"\x01" + _text(b"localhost")
    head += b"\x0f\x10" + _text(b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
    if key:
        head += b"\x00" + _text(b"x-api-key") + _text(key.encode())
    message = b"\x00" + struct.pack(">I", 1000) + b"hello"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(4, 0, 0, b"")
        + _frame(1, 4, 1, head)
        + _frame(0, 0, 1, message)
    )
    return connection


class _Naming(grpc.aio.ServerInterceptor):
    """Takes the key of a call for its caller."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        current_caller.set(dict(handler_call_details.invocation_metadata).get("x-api-key", ""))
        return handler


def _serve(arrivals: MessageArrivals, use: Callable[[int, Any], Awaitable[None]]) -> None:
    async def run() -> None:
        server = make_server(interceptors=[_Naming()], arrivals=arrivals)
        server.add_generic_rpc_handlers((_Echo(),))
        port = listen(server, "127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await use(port, channel)
        finally:
            await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


async def _status(channel: Any, key: str = "") -> Any:
    try:
        await channel.unary_unary(METHOD)(b"x" * 100, metadata=(("x-api-key", key),))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _until(channel: Any, status: Any) -> None:
    while await _status(channel) != status:
        await asyncio.sleep(0.05)


def test_calls_that_do_not_send_their_message_are_limited() -> None:
    async def use(port: int, channel: Any) -> None:
        assert await _status(channel) == grpc.StatusCode.OK
        with contextlib.ExitStack() as stack:
            for method in (METHOD, STREAMED):
                stack.enter_context(half_sent(port, method))
            await _until(channel, grpc.StatusCode.RESOURCE_EXHAUSTED)
            many = channel.unary_stream(STREAMED)(b"x")
            try:
                await many.read()
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "too many other calls" in str(error.details())
            else:
                raise AssertionError("the call was not refused")
        # Both connections are closed, and their places are free.
        await _until(channel, grpc.StatusCode.OK)
        assert [await _status(channel) for _ in range(5)] == [grpc.StatusCode.OK] * 5

    _serve(MessageArrivals(2, patience=0.1), use)


def test_one_callers_messages_leave_places_for_others() -> None:
    arrivals = MessageArrivals(4, keyed=True, patience=1.0)

    async def use(port: int, channel: Any) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(half_sent(port, METHOD, "a"))
            while len(arrivals.held) < 3:
                await asyncio.sleep(0.05)
            assert await _status(channel, "a") == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert [await _status(channel, "b") for _ in range(5)] == [grpc.StatusCode.OK] * 5

    _serve(arrivals, use)


def test_a_message_that_does_not_arrive_in_time_ends_its_call() -> None:
    async def use(port: int, channel: Any) -> None:
        with half_sent(port, METHOD), half_sent(port, STREAMED):
            await _until(channel, grpc.StatusCode.RESOURCE_EXHAUSTED)
            await _until(channel, grpc.StatusCode.OK)

    _serve(MessageArrivals(2, patience=0.1, seconds=2.0), use)


def test_calls_that_do_not_send_their_message_end_with_the_server() -> None:
    arrivals = MessageArrivals(2, patience=0.1)

    async def use(port: int, channel: Any) -> None:
        with half_sent(port, METHOD), half_sent(port, STREAMED):
            await _until(channel, grpc.StatusCode.RESOURCE_EXHAUSTED)
            arrivals.cut()
            await _until(channel, grpc.StatusCode.OK)

    _serve(arrivals, use)


def test_many_calls_at_once_wait_for_one_another() -> None:
    async def use(port: int, channel: Any) -> None:
        got = await asyncio.gather(*(_status(channel) for _ in range(100)))
        assert got == [grpc.StatusCode.OK] * 100

    _serve(MessageArrivals(2, patience=PATIENCE), use)
