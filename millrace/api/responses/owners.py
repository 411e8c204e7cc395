"""Whose a stored response or conversation is: of the API key that it was made with.

To the holders of other keys it is not there, even if they know its id.
"""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from millrace.api.context import caller_of
from millrace.api.responses.ids import belongs
from millrace.errors import NotFound


def owned(http: HttpRequest) -> None:
    """What a path names as its `id` belongs to who asks for it; a dependency of routes."""
    if (id := http.path_params.get("id")) is not None:
        demand(id, caller_of(http))


def demand(id: str, caller: str, param: str = "response_id") -> None:
    if not belongs(id, caller):
        if id.startswith("conv_"):
            raise NotFound(f"There is no conversation '{id}' here.", param="conversation")
        raise NotFound(f"There is no response '{id}' here.", param=param)
