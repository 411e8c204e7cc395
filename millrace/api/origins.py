"""Which web pages may have this server do something: its own, and those the operator named.

A browser lets any page send requests anywhere, though not read the answers; it names the page's origin
with each that may change something. Programs send none, or one of a scheme that no web page can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.api import errors
from millrace.errors import NotAllowed

CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_PORTS = {"http": 80, "https": 443}


def is_foreign(origin: str, host: str, allowed: Sequence[str]) -> bool:
    """Whether a page is neither allowed nor the server's own, by the name it was asked under.

    `null` is what pages in a sandbox and local files have for an origin: anybody may be behind it.
    """
    if "*" in allowed or origin in allowed:
        return False
    try:
        parts = urlsplit(origin)
        if parts.scheme not in _PORTS:
            return not parts.scheme  # an installed program's own, as app:// or vscode-webview://
        page = parts.hostname, parts.port or _PORTS[parts.scheme]
        # Behind a proxy that ends TLS, the page's scheme is not the one that is spoken here.
        asked = urlsplit(f"{parts.scheme}://{host}")
        return page != (asked.hostname, asked.port or _PORTS[parts.scheme])
    except ValueError:
        return True


class OriginMiddleware:
    """Refuses what a foreign page asks for, unless it only looks."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in CHANGING:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin and is_foreign(origin, headers.get("host", ""), self._allowed):
                error = NotAllowed(
                    "A web page of another origin asked for this. Start the server with "
                    "--cors-origin and the page's origin to allow it."
                )
                response = await errors.respond(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
