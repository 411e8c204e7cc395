"""Queries of stored responses, each of which reads a bounded number of rows.

Blocking, and used by one thread at a time; `store.py` is how the rest of the server reaches it.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.api.responses.ids import OWNER_LENGTH
from millrace.api.responses.measure import StoredMeasure
from millrace.api.responses.sections import (
    BATCH_BYTES,
    BATCH_SECTIONS,
    Cursor,
    Item,
    ItemBatch,
    Section,
    Sections,
)
from millrace.api.responses.space import StoreUsage
from millrace.api.responses.tables import open_reader

_LINKS = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
    LIMIT ?
)
SELECT id, previous FROM chain ORDER BY depth
"""
_LAST = (1 << 63) - 1


@dataclass(frozen=True)
class StoredResponse:
    """A response without its output items, and the measure of all that it and its chain hold."""

    body: dict[str, Any]
    measure: StoredMeasure


@dataclass(frozen=True)
class StoredConversation:
    created: int
    metadata: dict[str, Any]
    measure: StoredMeasure


class StoreReader:
    def __init__(self, path: Path) -> None:
        self._sql = open_reader(path)

    def close(self) -> None:
        self._sql.close()

    def usage(self, whose: str) -> StoreUsage:
        return usage_of(self._sql, whose)

    def head(self, id: str) -> StoredResponse | None:
        row = self._one("SELECT body, turns, text FROM responses WHERE id = ?", id)
        return None if row is None else StoredResponse(decode(row[0]), StoredMeasure(*row[1:]))

    def response(self, id: str) -> dict[str, Any] | None:
        """A response as clients see it."""
        if (found := self.head(id)) is None:
            return None
        rows = self._all(
            "SELECT body FROM items WHERE owner = ? AND part = 'output' ORDER BY number", id
        )
        return found.body | {"output": [decode(body) for (body,) in rows]}

    def events(self, id: str) -> bytes | None:
        row = self._one("SELECT events FROM responses WHERE id = ?", id)
        return None if row is None else row[0]

    def links(self, id: str, most: int = BATCH_SECTIONS) -> list[tuple[str, str | None]]:
        """A response's chain, newest first, as far as one step goes: ids, and what each goes back to."""
        return self._all(_LINKS, id, most)

    def item(self, id: str, whose: str) -> Item | None:
        """An item by its id, from any response or conversation of one caller."""
        row = self._one(
            f"SELECT body FROM items WHERE id = ? AND substr(owner, -{OWNER_LENGTH}) = ? "
            "ORDER BY number LIMIT 1",
            id,
            whose,
        )
        return None if row is None else decode(row[0])

    def conversation(self, id: str) -> StoredConversation | None:
        row = self._one("SELECT created, metadata, turns, text FROM conversations WHERE id = ?", id)
        if row is None:
            return None
        return StoredConversation(row[0], decode(row[1]), StoredMeasure(*row[2:]))

    def conversation_item(self, conversation: str, id: str) -> Item | None:
        row = self._one(
            "SELECT body FROM items WHERE owner = ? AND id = ? ORDER BY number LIMIT 1",
            conversation,
            id,
        )
        return None if row is None else decode(row[0])

    def find(
        self, sections: Sections, id: str, begin: int, newest_first: bool
    ) -> tuple[Cursor | None, int]:
        """Where an item is in a list, and the section to go on with if it was not found yet.

        Sections are searched from the end of the list's order. If an id occurs more than once, the last
        one in that order is meant: a client that reads page after page then always gets on.
        """
        order, step = ("ASC", 1) if newest_first else ("DESC", -1)
        last = begin
        for _ in range(BATCH_SECTIONS):
            if not 0 <= last < len(sections):
                break
            section = sections[last]
            row = self._one(
                "SELECT number FROM items WHERE owner = ? AND id = ? "
                f"AND (? IS NULL OR part = ?) ORDER BY number {order} LIMIT 1",
                section.owner,
                id,
                section.part,
                section.part,
            )
            if row is not None:
                return Cursor(last, row[0]), last
            last += step
        return None, last

    def batch(
        self,
        sections: Sections,
        *,
        newest_first: bool,
        most: int,
        after: Cursor | None = None,
        until: Cursor | None = None,
        rules: bool = False,
    ) -> ItemBatch:
        """The next items of a list, between two places in its order; `rules` are those with instructions.

        Ends early at a bound of `sections.py`, and then has neither `more` nor `ended`.
        """
        found: list[bytes] = []
        size = 0
        at = after
        for index in self._places(sections, after, until, newest_first)[:BATCH_SECTIONS]:
            low, high = _between(index, after, until, newest_first)
            rows = self._rows(
                sections[index], low, high, newest_first, most - len(found) + 1, rules
            )
            with closing(rows):  # a statement left open would keep the log from being cut
                for number, body in rows:
                    if len(found) == most:
                        return ItemBatch(_decoded(found), at, more=True, ended=False)
                    if found and size + len(body) > BATCH_BYTES:
                        return ItemBatch(_decoded(found), at, more=False, ended=False)
                    found.append(body)
                    size += len(body)
                    at = Cursor(index, number)
            at = Cursor(index, 0 if newest_first else _LAST)
        left = self._places(sections, at, until, newest_first)[1:] if at else range(0)
        return ItemBatch(_decoded(found), at, more=False, ended=not left)

    @staticmethod
    def _places(
        sections: Sections, after: Cursor | None, until: Cursor | None, newest_first: bool
    ) -> range:
        """The sections from one place to another, both included, in the list's order."""
        if newest_first:
            first = after.section if after else len(sections) - 1
            return range(first, (until.section if until else 0) - 1, -1)
        last = until.section if until else len(sections) - 1
        return range(after.section if after else 0, last + 1)

    def _rows(
        self,
        section: Section,
        low: int,
        high: int,
        newest_first: bool,
        limit: int,
        rules: bool,
    ) -> sqlite3.Cursor:
        return self._sql.execute(
            "SELECT number, body FROM items WHERE owner = ? AND number > ? AND number < ? "
            f"{'AND part = ?' if section.part else 'AND ? IS NULL'} "
            f"{'AND rule IS NOT 0' if rules else ''} "
            f"ORDER BY number {'DESC' if newest_first else 'ASC'} LIMIT ?",
            (section.owner, low, high, section.part, limit),
        )

    def _one(self, query: str, *values: object) -> Any:
        rows = self._all(query, *values)
        return rows[0] if rows else None

    def _all(self, query: str, *values: object) -> list[Any]:
        return self._sql.execute(query, values).fetchall()


def usage_of(sql: sqlite3.Connection, whose: str) -> StoreUsage:
    """Bytes that one caller has stored, and all of them."""
    query = "SELECT coalesce(sum(bytes) FILTER (WHERE caller = ?), 0), coalesce(sum(bytes), 0) FROM usage"
    return StoreUsage(*sql.execute(query, (whose,)).fetchone())


def _between(
    index: int, after: Cursor | None, until: Cursor | None, newest_first: bool
) -> tuple[int, int]:
    """The numbers between which a section's items are wanted."""
    begin = after.number if after and after.section == index else None
    end = until.number if until and until.section == index else None
    low, high = (end, begin) if newest_first else (begin, end)
    return -1 if low is None else low, _LAST if high is None else high


def _decoded(bodies: list[bytes]) -> list[Item]:
    return [decode(body) for body in bodies]


def decode(body: bytes) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(body)
    return value
