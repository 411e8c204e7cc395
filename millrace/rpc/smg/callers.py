"""Who calls: the key that a call brings in its metadata, the role that it needs, and what its holder may
use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from millrace.caller import current_caller
from millrace.config import ServeConfig
from millrace.errors import MillraceError, RateLimited, RoleNeeded, Unauthorized
from millrace.rpc.calls import refusal
from millrace.serving import access
from millrace.serving.dispatch import Origin
from millrace.serving.keys import Caller, Keys, secrets_in
from millrace.serving.metrics import Metrics
from millrace.serving.quotas import Quotas


class Callers:
    def __init__(self, config: ServeConfig, quotas: Quotas, metrics: Metrics) -> None:
        self._keys = Keys(config.api_keys)
        self._quotas = quotas
        self._metrics = metrics
        self._isolated = config.cache_isolation == "key"

    def check(self, metadata: Any, method: str) -> None:
        """Raise that a call has no key of this server's, or one without the role that it needs; note whose
        call it is."""
        needed = access.RPC.get(method, "admin")
        if needed == "open":
            return
        caller = self._known(metadata, method)
        if caller is not None:
            current_caller.set(caller.id)
        try:
            access.check(method, needed, caller, self._keys)
        except RoleNeeded as error:
            raise self._refused(method, error) from None

    def viewer(self, context: Any, method: str) -> str | None:
        """The caller whose requests alone may be shown and cancelled; None for those who may see all."""
        caller = self._known(context.invocation_metadata(), method)
        return None if caller is None or caller.is_admin else caller.id

    def _known(self, metadata: Any, method: str) -> Caller | None:
        """Who calls, on a server with keys; raises that a call has none of them."""
        if not self._keys:
            return None
        given = secrets_in(
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in metadata or ()
        )
        if (caller := self._keys.find(given)) is not None:
            return caller
        raise self._refused(
            method,
            Unauthorized("The API key is not one of this server's.")
            if given
            else Unauthorized(
                "This server needs an API key: send it as metadata, 'authorization: Bearer KEY' or "
                "'x-api-key: KEY'."
            ),
        )

    def admitted(self, context: Any, method: str) -> Origin:
        """Where work comes from that a call asks for; raises that it may not have it."""
        caller = self._known(context.invocation_metadata(), method)
        id = caller.id if caller is not None else ""
        whose = id or _host(context.peer())
        current_caller.set(whose)
        try:
            if self._quotas.rates:
                self._quotas.rates.admit(whose)
        except RateLimited as error:
            raise self._refused(method, error) from None
        return Origin(method, id, self._quotas.of(whose), self._isolated)

    def _refused(self, method: str, error: MillraceError) -> MillraceError:
        self._metrics.refused(method, error.code)
        return error


def _host(peer: str) -> str:
    """The address in gRPC's spelling of a peer, like ipv4:127.0.0.1:5000."""
    return peer.partition(":")[2].rpartition(":")[0]


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose key has not the role that the method needs, before their message is read, and
    names the caller of the others."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        if handler is None or access.RPC.get(details.method) == "open":
            return handler
        try:
            self._callers.check(details.invocation_metadata, details.method)
        except MillraceError as error:
            return refusal(error)
        return handler
