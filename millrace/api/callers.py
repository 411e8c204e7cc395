"""What HTTP knows of callers: which paths need no key, which calls are limited, who asks, and whose
requests they see.
"""

from __future__ import annotations

from starlette.requests import Request

from millrace.api.context import context_of, known_caller
from millrace.serving import access

PAGE_FILES = "/web/"
"""Where the page's own files are, which are as public."""

STORED = ("/v1/responses/", "/v1/conversations/")
"""Where stored responses and conversations are read and deleted."""


def is_open(path: str) -> bool:
    """Whether this is answered without a key: it tells nothing that is not in the public source."""
    return path in access.OPEN_PATHS or path.startswith(PAGE_FILES)


def is_limited(method: str, path: str) -> bool:
    """Whether a request counts in the rate limits: if it asks for work, or reads or deletes what is stored.

    Requests that only show the server's state, and those that cancel, never count.
    """
    if path.endswith("/cancel") or path == "/abort_request" or path.startswith("/v1/requests/"):
        return False
    if method == "GET":
        return path.startswith(STORED) or path == "/flush_cache"
    return method in ("POST", "PUT", "DELETE")


def uses_tokens(method: str) -> bool:
    """Whether a limited request may cost tokens, so that it waits while its caller has used up those."""
    return method in ("POST", "PUT")


def viewer_of(http: Request) -> str | None:
    """The caller whose requests alone may be shown and cancelled; None for those who may see all.

    Those are administrators, and everybody on a server without keys.
    """
    caller = known_caller(http)
    return None if caller is None or caller.is_admin else caller.id


def need_admin(http: Request, what: str) -> None:
    """Raise that only administrators may do this, unless the caller is one."""
    access.check(what, "admin", known_caller(http), context_of(http).keys)


async def permitted(http: Request) -> None:
    """A dependency of every route of a server with keys: the caller's key has the role it needs."""
    method, path = http.method, http.scope["route"].path
    needed = access.HTTP.get((method, path), "admin")
    if needed == "admin":
        need_admin(http, f"{method} {http.url.path}")
