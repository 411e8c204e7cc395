"""Lists in pages, as OpenAI's clients ask for them: after, limit and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from millrace.api.responses.items import Item
from millrace.errors import BadRequest, NotFound


def page(http: HttpRequest, items: Sequence[Item]) -> dict[str, Any]:
    """The part of a list, given oldest first, that the query asks for."""
    query = http.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    limit = number(http, "limit", 20)
    if not 1 <= limit <= 100:
        raise BadRequest("limit must be 1 to 100.", param="limit")
    rows = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after"):
        ids = [i["id"] for i in rows]
        if after not in ids:
            raise NotFound(f"There is no item '{after}' in this list.", param="after")
        rows = rows[ids.index(after) + 1 :]
    return listed(rows[:limit], len(rows) > limit)


def listed(items: Sequence[Item], more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }


def number(http: HttpRequest, name: str, default: int) -> int:
    value = http.query_params.get(name)
    try:
        return default if value is None else int(value)
    except ValueError as error:
        raise BadRequest(f"{name} must be a whole number.", param=name) from error
