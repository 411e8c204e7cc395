"""The caller of the request that is being served, for queues that share work between callers.

The id of the caller's key, or the client's address on a server without keys. Set where a request
enters (HTTP, gRPC); tasks and `asyncio.to_thread` carry it along. Empty outside of requests.
"""

from __future__ import annotations

from contextvars import ContextVar

current_caller: ContextVar[str] = ContextVar("current_caller", default="")
