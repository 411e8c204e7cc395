"""Under which names this server may be asked, so that no web site can pass for the server's own page.

A site can have its own name point at 127.0.0.1: its pages then ask the server under the site's name, and
browsers take server and site for one. Addresses, and names that no site can have, are always right: the
network's own have no dot.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.api import authority, errors
from millrace.config import ServeConfig
from millrace.errors import NotAllowed
from millrace.serving.keys import is_loopback

_THIS_MACHINE = frozenset(
    {"localhost", "*.localhost", "host.docker.internal", "host.containers.internal"}
)
"""What browsers hold to be this machine, and what containers call it: nobody can register `.internal`."""
_OWN = re.compile(r"[a-z0-9_-]+")
"""A name without a dot is of this machine or its network: nobody can register one."""
_SHOWN = 100
"""Characters of a refused name that are told."""


def names_of(config: ServeConfig) -> frozenset[str] | None:
    """The names that are answered beside addresses; None where all are.

    Where only this machine reaches the server, and needs no key, its users' browsers are the one way in
    for others. With a key, a site under a false name still lacks the key.
    """
    guarded = is_loopback(config.host) and not config.api_keys and "*" not in config.cors_origins
    if "*" in config.allowed_hosts or not (guarded or config.allowed_hosts):
        return None
    named = (config.host, *config.allowed_hosts, *map(_site, config.cors_origins))
    return (_THIS_MACHINE | {name.lower() for name in named}) - {""}


def _site(origin: str) -> str:
    """The name of a web site whose pages may use this server anyway; other schemes name no site."""
    try:
        parts = urlsplit(origin)
        return parts.hostname or "" if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def is_known(host: str, names: Collection[str]) -> bool:
    """Whether a Host header names an address or one of these; `*.` before a name is all below it."""
    found = authority.parse(host)
    if found is None:
        return False
    name = found.name if found.is_address else found.name.removesuffix(".")
    if found.is_address or _OWN.fullmatch(name) or name in names:
        return True
    return any(f"*{name[at:]}" in names for at, c in enumerate(name) if c == ".")


class HostMiddleware:
    """Refuses whatever is asked under another name, to look as well as to change."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for host in Headers(scope=scope).getlist("host"):
                if host and not is_known(host, self._names):
                    response = await errors.respond(Request(scope), _refusal(host))
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _refusal(host: str) -> NotAllowed:
    shown = "".join(c if c.isprintable() else "?" for c in host[:_SHOWN])
    return NotAllowed(
        f"This server was asked under the name '{shown}', which any web site could have pointed here. If "
        "the name is yours, a proxy's or a tunnel's say, start the server with --allowed-host and the "
        "name without its port, or with an API key."
    )
