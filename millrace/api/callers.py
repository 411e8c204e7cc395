"""What HTTP knows of callers: which paths need no key, which calls are limited, and who asks."""

from __future__ import annotations

from starlette.requests import Request

from millrace.serving.keys import Caller

OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json"})
"""What is answered without a key: it tells nothing that is not in the public source."""

PAGE_FILES = "/web/"
"""Where the page's own files are, which are as public."""

STORED = ("/v1/responses/", "/v1/conversations/")
"""Where stored responses and conversations are read and deleted."""


def is_open(path: str) -> bool:
    """Whether anybody may ask for this without a key."""
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


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


def caller_of(http: Request) -> str:
    """The id of the key that a request came with; empty on a server without keys."""
    caller = http.scope.get("state", {}).get("caller")
    return caller.id if isinstance(caller, Caller) else ""
