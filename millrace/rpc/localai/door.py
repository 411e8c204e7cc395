"""The door of a backend: it answers Health itself, and hands every other call on as it came.

To read a model's vocabulary holds up a whole Python process for seconds. So what has the model is a
process of its own behind this one, and whoever asks here whether anybody lives is answered at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from millrace.config import ApiKey
from millrace.errors import Unauthorized
from millrace.rpc.localai import wire
from millrace.rpc.protofile import Method
from millrace.serving.keys import Keys, secrets_in

_OK: bytes = wire.Reply(message=b"OK").SerializeToString()
_TRANSPORT = ("grpc-", "user-agent", "content-type", "te", ":")
"""Beginnings of metadata that belong to one connection."""


class BackendDoor:
    def __init__(self, inside: grpc.aio.Channel, token: str = "") -> None:
        """`token` is what callers must bring; empty lets everybody in. Its holder is the LocalAI that the
        backend belongs to, and may call every method."""
        self._inside = inside
        self._keys = Keys([ApiKey(secret=token, role="admin")] if token else [])

    def handlers(self) -> grpc.GenericRpcHandler:
        found = {method.name: self._handler(method) for method in wire.METHODS}
        return grpc.method_handlers_generic_handler(wire.SERVICE, found)

    def _handler(self, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        path = f"/{wire.SERVICE}/{method.name}"
        if method.name == "Health":
            return grpc.unary_unary_rpc_method_handler(self._health)
        if method.streams:
            many: Any = self._inside.unary_stream(path)

            async def relayed(raw: bytes, context: Any) -> AsyncIterator[bytes]:
                self._admit(context)
                call = many(raw, **_passed_on(context))
                try:
                    async for answer in call:
                        yield answer
                    context.set_trailing_metadata(_own(await call.trailing_metadata()))
                except grpc.aio.AioRpcError as error:
                    await _abort(context, error)
                finally:
                    call.cancel()

            return grpc.unary_stream_rpc_method_handler(relayed)
        one: Any = self._inside.unary_unary(path)

        async def relay(raw: bytes, context: Any) -> Any:
            self._admit(context)
            call = one(raw, **_passed_on(context))
            try:
                answer = await call
                context.set_trailing_metadata(_own(await call.trailing_metadata()))
                return answer
            except grpc.aio.AioRpcError as error:
                await _abort(context, error)
            finally:
                call.cancel()

        return grpc.unary_unary_rpc_method_handler(relay)

    async def _health(self, raw: bytes, context: Any) -> bytes:
        self._admit(context)
        return _OK

    def _admit(self, context: Any) -> None:
        if not self._keys:
            return
        given = [
            (key.encode(), value if isinstance(value, bytes) else value.encode())
            for key, value in context.invocation_metadata() or ()
        ]
        if self._keys.find(secrets_in(given)) is None:
            raise Unauthorized("This backend needs the token that it was started with.")


def _passed_on(context: Any) -> dict[str, Any]:
    """How long the caller waits; a call that is gone here is gone behind the door too."""
    return {"timeout": context.time_remaining(), "wait_for_ready": True}


async def _abort(context: Any, error: grpc.aio.AioRpcError) -> None:
    """End the call as it ended behind the door."""
    context.set_trailing_metadata(_own(error.trailing_metadata()))
    await context.abort(error.code(), error.details() or "")


def _own(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((k, v) for k, v in metadata or () if not k.startswith(_TRANSPORT))
