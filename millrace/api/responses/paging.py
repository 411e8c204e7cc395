"""Lists in pages, as OpenAI's clients ask for them: after, before, limit and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from millrace.api.responses.sections import Cursor, Item, Sections
from millrace.api.responses.store import Store
from millrace.errors import BadRequest, NotFound


async def page(http: HttpRequest, store: Store, sections: Sections) -> dict[str, Any]:
    """The part of a list that the query asks for: no more than that is read."""
    query = http.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    limit = number(http, "limit", 20)
    if not 1 <= limit <= 100:
        raise BadRequest("limit must be 1 to 100.", param="limit")
    newest_first = order == "desc"
    after = await _place(store, sections, query.get("after"), "after", newest_first)
    until = await _place(store, sections, query.get("before"), "before", newest_first)
    if until is not None and after is None:
        # The page that ends there: read from its end.
        items, more = await _read(store, sections, until, None, limit, not newest_first)
        return listed(items[::-1], more)
    return listed(*await _read(store, sections, after, until, limit, newest_first))


async def _place(
    store: Store, sections: Sections, id: str | None, param: str, newest_first: bool
) -> Cursor | None:
    if not id:
        return None
    found = await store.find(sections, id, newest_first)
    if found is None:
        raise NotFound(f"There is no item '{id}' in this list.", param=param)
    return found


async def _read(
    store: Store,
    sections: Sections,
    after: Cursor | None,
    until: Cursor | None,
    limit: int,
    newest_first: bool,
) -> tuple[list[Item], bool]:
    """Up to `limit` items from one place on, and whether there are more."""
    found: list[Item] = []
    if after and until and (after <= until if newest_first else after >= until):
        return found, False
    while True:
        batch = await store.batch(
            sections,
            newest_first=newest_first,
            most=limit - len(found),
            after=after,
            until=until,
        )
        found += batch.items
        after = batch.at
        if batch.more or batch.ended:
            return found, batch.more


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
