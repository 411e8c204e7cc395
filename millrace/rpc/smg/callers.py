"""Who calls: the key that a call brings in its metadata, and what its holder may use."""

from __future__ import annotations

import functools
from typing import Any

from millrace.caller import current_caller
from millrace.config import ServeConfig
from millrace.errors import MillraceError, RateLimited, Unauthorized
from millrace.serving.handing import Origin
from millrace.serving.keys import Caller, Keys, secrets_in
from millrace.serving.limits import RateLimits
from millrace.serving.metrics import Metrics


class Callers:
    def __init__(self, config: ServeConfig, limits: RateLimits, metrics: Metrics) -> None:
        self._keys = Keys(config.api_keys)
        self._limits = limits
        self._metrics = metrics
        self._isolated = config.cache_isolation == "key"

    def known(self, context: Any, method: str) -> Caller | None:
        """Who calls, on a server with keys; raises that a call has none of them."""
        if not self._keys:
            return None
        given = secrets_in(
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in context.invocation_metadata() or ()
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
        caller = self.known(context, method)
        id = caller.id if caller is not None else ""
        whose = id or _host(context.peer())
        current_caller.set(whose)
        if not self._limits:
            return Origin(method, id, isolated=self._isolated)
        try:
            self._limits.admit(whose)
        except RateLimited as error:
            raise self._refused(method, error) from None
        charge = functools.partial(self._limits.charge, whose)
        return Origin(method, id, charge, self._isolated)

    def _refused(self, method: str, error: MillraceError) -> MillraceError:
        self._metrics.refused(method, error.code)
        return error


def _host(peer: str) -> str:
    """The address in gRPC's spelling of a peer, like ipv4:127.0.0.1:5000."""
    return peer.partition(":")[2].rpartition(":")[0]
