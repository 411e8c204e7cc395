"""What a request goes back to: the items of a chain or a conversation that its prompt is built from.

Read newest first and in batches. Reading stops once the items read cannot fit the model's window.
"""

from __future__ import annotations

from millrace.api.responses.ids import belongs
from millrace.api.responses.items import Item
from millrace.api.responses.measure import Room, StoredMeasure, measure
from millrace.api.responses.owners import demand
from millrace.api.responses.plan import conversation_id
from millrace.api.responses.schema import CompactRequest, ResponsesRequest
from millrace.api.responses.sections import BATCH_ITEMS, Cursor, Section, Sections
from millrace.api.responses.store import Store
from millrace.api.responses.truncation import is_rule, without
from millrace.errors import BadRequest, PreviousResponseNotFound

Wire = ResponsesRequest | CompactRequest


async def before(
    store: Store, wire: Wire, caller: str, room: Room, given: list[Item], *, shorten: bool
) -> list[Item]:
    """The items before those of the request itself (`given`), oldest first.

    `shorten` leaves out old items that cannot fit; otherwise they are refused.
    """
    found = await _sections(store, wire, caller)
    if found is None:
        return []
    sections, stored = found
    own = measure(given)
    if not shorten:
        await room.demand(own.plus(stored))
    newest, at = await _newest(store, sections, room, own, shorten)
    if at is None:
        return newest
    held = measure(item for item in newest + given if is_rule(item))
    return await _rules(store, sections, room, held, at) + without(newest, 0)


async def _sections(store: Store, wire: Wire, caller: str) -> tuple[Sections, StoredMeasure] | None:
    if (id := wire.previous_response_id) is not None:
        store.demand("previous_response_id")
        last = await store.head(id) if belongs(id, caller) else None
        if last is None:
            raise PreviousResponseNotFound(id)
        if last.body["status"] in ("queued", "in_progress"):
            raise BadRequest(f"The response '{id}' is not finished.", param="previous_response_id")
        if last.body.get("conversation"):
            raise BadRequest(
                f"The response '{id}' belongs to a conversation; go on with that.",
                param="previous_response_id",
            )
        return await store.chain(id), last.measure
    if (id := conversation_id(wire)) is not None:
        demand(id, caller)
        return [Section(id)], (await store.conversation(id)).measure
    return None


async def _newest(
    store: Store, sections: Sections, room: Room, measured: StoredMeasure, shorten: bool
) -> tuple[list[Item], Cursor | None]:
    """All items, oldest first, or the newest of them and where reading stopped."""
    found: list[Item] = []
    at: Cursor | None = None
    while True:
        batch = await store.batch(sections, newest_first=True, most=BATCH_ITEMS, after=at)
        found += batch.items
        measured = measured.plus(measure(batch.items))
        at = batch.at
        if batch.ended:
            return found[::-1], None
        if not shorten:
            await room.demand(measured)
        elif not room.fits(measured):
            return found[::-1], at


async def _rules(
    store: Store, sections: Sections, room: Room, measured: StoredMeasure, at: Cursor
) -> list[Item]:
    """The instructions from before a place, which are never left out; `measured` are those after it."""
    found: list[Item] = []
    ended = False
    while not ended:
        batch = await store.batch(
            sections, newest_first=True, most=BATCH_ITEMS, after=at, rules=True
        )
        kept = [item for item in batch.items if is_rule(item)]
        found += kept
        measured = measured.plus(measure(kept))
        await room.demand(measured)
        assert batch.at is not None
        at, ended = batch.at, batch.ended
    return found[::-1]
