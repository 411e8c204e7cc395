"""The gRPC server that both fronts run on: the sizes and keep-alives that their peers count on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from millrace.errors import SetupError
from millrace.rpc.arrivals import MessageArrivals
from millrace.rpc.calls import CallInterceptor

MOST_BYTES = 50 << 20
"""Of one message, either way: what LocalAI and the gateway send at most."""
SIZES: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
)
_OPTIONS: tuple[tuple[str, Any], ...] = (
    *SIZES,
    # Gateways ping connections that are idle, and would be sent away for it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection that never speaks HTTP/2 is cut.
    ("grpc.server_handshake_timeout_ms", 30_000),
    # A second process on the port would get half of the calls.
    ("grpc.so_reuseport", 0),
)


READER_TIMEOUT = 60.0
"""Seconds that a caller may leave a message of a stream unread, where nothing else is said."""


def make_server(
    reader_timeout: float = READER_TIMEOUT,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    arrivals: MessageArrivals | None = None,
) -> grpc.aio.Server:
    """`interceptors` come after the one that reads calls and ends them with what they raise; `arrivals`
    limits the messages that are being received."""
    inner = [CallInterceptor(reader_timeout, arrivals), *interceptors]
    return grpc.aio.server(interceptors=inner, options=_OPTIONS)


def listen(server: grpc.aio.Server, address: str) -> int:
    """Open the address, like 127.0.0.1:50051; returns its port."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise SetupError(
            f"Cannot listen on {address}. Another program may have the port, or it is no address "
            "of this machine."
        )
    return int(port)
