"""What HTTP knows of callers: which paths need no key, which calls are limited, and who asks."""

from __future__ import annotations

from starlette.requests import Request

from millrace.serving.keys import Caller

OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json"})
"""What is answered without a key: it tells nothing that is not in the public source."""

PAGE_FILES = "/web/"
"""Where the page's own files are, which are as public."""


def is_open(path: str) -> bool:
    """Whether anybody may ask for this without a key."""
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def is_limited(method: str, path: str) -> bool:
    """Whatever asks for work; to look, and to cancel, is always allowed."""
    cancels = path.endswith("/cancel") or path == "/abort_request"
    return method in ("POST", "PUT") and not cancels


def caller_of(http: Request) -> str:
    """The id of the key that a request came with; empty on a server without keys."""
    caller = http.scope.get("state", {}).get("caller")
    return caller.id if isinstance(caller, Caller) else ""
