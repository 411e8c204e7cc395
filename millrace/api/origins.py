"""Which web pages may have this server do something: its own, and those the operator named.

A browser lets any page send requests anywhere, though not read the answers; it names the page's origin
with each that may change something. Programs send none, or one of a scheme that no web page can have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.api import authority, errors
from millrace.api.context import caller_of
from millrace.errors import MethodNotAllowed, NotAllowed

CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
CHANGING_GETS = frozenset({"/flush_cache"})
"""Paths whose GET changes something, because another server's API has it so."""
_PORTS = {"http": 80, "https": 443}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\\\s]*)", re.ASCII | re.IGNORECASE)
_WEB = frozenset({"about", "blob", "content", "data", "file", "filesystem", "ftp", "ws", "wss"})
"""Schemes under which a browser shows documents of unknown authors: they identify no program."""


def is_foreign(origin: str, host: str, allowed: Sequence[str]) -> bool:
    """Whether a page is neither allowed nor the server's own, by the name in the Host header.

    `null` is the origin of pages in a sandbox and of local files: their author is unknown.
    """
    if "*" in allowed or origin in allowed:
        return False
    match = _ORIGIN.fullmatch(origin)
    if match is None:
        return True
    scheme = match[1].lower()
    if scheme not in _PORTS:
        return scheme in _WEB  # else an installed program's own, as app:// or vscode-webview://
    # Behind a proxy that ends TLS, the page's scheme is not the one that is spoken here.
    page, asked = authority.parse(match[2]), authority.parse(host)
    if page is None or asked is None:
        return True
    standard = _PORTS[scheme]
    return (page.name, page.port or standard) != (asked.name, asked.port or standard)


def is_foreign_request(headers: Headers, allowed: Sequence[str]) -> bool:
    """Whether a browser sent this for a page of another origin.

    Without an Origin, Sec-Fetch-Site decides: browsers set it, and pages cannot.
    """
    host = headers.get("host", "")
    if origins := [origin for origin in headers.getlist("origin") if origin]:
        return any(is_foreign(origin, host, allowed) for origin in origins)
    site = headers.get("sec-fetch-site")
    return "*" not in allowed and site not in (None, "same-origin", "none")


def check_changing_get(http: Request, allowed: Sequence[str]) -> None:
    """Refuse a GET that changes something, unless it has a key or comes from an allowed page.

    A page can have a browser send a GET without an Origin, by an image for example. A browser too old
    for Sec-Fetch-Site, whose page withholds the Referer, then sends the same headers as a program does;
    so a request that carries no proof is refused, and programs without a key use POST.
    """
    headers = http.headers
    site = headers.get("sec-fetch-site")
    # OriginMiddleware has refused foreign origins and sites; `none` is an address opened by a user.
    if caller_of(http) or "*" in allowed or headers.get("origin") or site == "same-origin":
        return
    if site is None and (referer := headers.get("referer")):
        if is_foreign(_origin_of(referer), headers.get("host", ""), allowed):
            raise _refusal()
        return
    raise MethodNotAllowed(
        f"GET {http.scope['path']} changes something and is answered only with an API key or to this "
        "server's own page. Use POST.",
        allow=("POST",),
    )


def _origin_of(address: str) -> str:
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}"


class OriginMiddleware:
    """Refuses what a foreign page asks for, unless it only reads."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and (scope["method"] in CHANGING or scope["path"] in CHANGING_GETS)
            and is_foreign_request(Headers(scope=scope), self._allowed)
        ):
            response = await errors.respond(Request(scope), _refusal())
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal() -> NotAllowed:
    return NotAllowed(
        "A web page of another origin asked for this. Start the server with "
        "--cors-origin and the page's origin to allow it."
    )
