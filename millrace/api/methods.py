"""Which methods a path has, and HEAD wherever there is GET."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.api.openapi.routing import every
from millrace.api.origins import CHANGING_GETS


def methods_of(app: Starlette, path: str) -> list[str]:
    """All methods that some route has at this path, sorted, as an Allow header lists them."""
    found: set[str] = set()
    for route in every(app.routes):
        if route.path_regex.match(path):
            found |= route.methods or set()
    if "GET" in found and path not in CHANGING_GETS:
        found.add("HEAD")
    return sorted(found)


class HeadMiddleware:
    """Answers HEAD with the status and the headers of GET.

    A GET that changes something has no HEAD: HEAD only reads, whoever sends it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        methods = methods_of(scope["app"], scope["path"])
        if not {"GET", "HEAD"} <= set(methods):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            # The response ends here: a stream would otherwise run on for a client that hears nothing.
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, send_head)
