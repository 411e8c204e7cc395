"""OpenAI's endpoints without the /v1 prefix, for clients whose base URL lacks it.

The path is completed before anything looks at it: keys, limits, routes, errors and metrics are those of the
/v1 endpoint, and nothing is registered twice.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/v1"
BARE = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/models",
    "/responses",
    "/conversations",
)
"""Served without the prefix, with all that is below them."""


class BarePathMiddleware:
    def __init__(self, app: ASGIApp, own: Collection[str]) -> None:
        """`own` are paths of their own, like llama.cpp's /models/load: they stay as they are."""
        self._app = app
        self._own = frozenset(own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_bare(scope["path"]) and scope["path"] not in self._own:
            scope["path"] = PREFIX + scope["path"]
            if scope.get("raw_path"):
                scope["raw_path"] = PREFIX.encode() + scope["raw_path"]
        await self._app(scope, receive, send)


def is_bare(path: str) -> bool:
    """Whether the path is one of OpenAI's without its prefix."""
    return any(path == bare or path.startswith(f"{bare}/") for bare in BARE)
