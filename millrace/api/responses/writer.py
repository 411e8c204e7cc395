"""Changes of stored responses, each of which is one transaction.

Blocking, and used by one thread at a time. Deletions are in two parts: what is named disappears at once,
and its items are then deleted batch by batch, so that other changes can come between.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from millrace.api.responses.ids import OWNER_LENGTH
from millrace.api.responses.measure import StoredMeasure, measure
from millrace.api.responses.reader import decode, usage_of
from millrace.api.responses.sections import BATCH_BYTES, BATCH_ITEMS, Item
from millrace.api.responses.space import StoreSpace, StoreUsage, is_full
from millrace.api.responses.tables import open_writer, roll_back
from millrace.api.responses.truncation import is_rule

_OLD_RESPONSES = """
SELECT id, created, rowid FROM responses WHERE (created, rowid) < (?, ?)
ORDER BY created DESC, rowid DESC LIMIT ?
"""
_SHRINK_PAGES = 256
T = TypeVar("T")
Age = tuple[float, int]
"""By which responses are ordered: when one was stored, and its row."""


class StoreWriter:
    def __init__(self, path: Path, limit: int | None = None, keys: int = 0) -> None:
        self._sql = open_writer(path)
        self.space = StoreSpace(path, limit, keys)
        self.space.restore()
        # What is only in the log takes space twice when it is written back: less than the reserve.
        (page,) = self._sql.execute("PRAGMA page_size").fetchone()
        pages = max(8, self.space.reserve // 4 // page)
        self._sql.execute(f"PRAGMA wal_autocheckpoint = {pages}").fetchall()

    def close(self) -> None:
        self._sql.close()

    def put(
        self,
        response: dict[str, Any],
        given: Sequence[Item],
        *,
        runner: int | None = None,
        events: bytes | None = None,
        conversation: str | None = None,
    ) -> None:
        """Keep a response with its own input, or replace it; add both to a conversation, if named."""
        id, previous = response["id"], response["previous_response_id"]
        body = _json({k: v for k, v in response.items() if k != "output"})
        own = measure(given).plus(measure(response["output"]))
        rows = _rows("input", given) + _rows("output", response["output"])
        with self._change():
            before = self._usage(id)
            total = own.plus(self._measure("responses", previous)) if previous else own
            self._sql.execute("DELETE FROM items WHERE owner = ?", (id,))
            replaced = self._sql.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount > 0
            self._sql.execute(
                "INSERT INTO responses "
                "(id, created, previous, runner, body, events, turns, text) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (id, time.time(), previous, runner, body, events, total.turns, total.text),
            )
            self._add(id, rows)
            if conversation is not None and self._grow(conversation, own):
                self._add(conversation, rows)
            if not replaced:  # a background response was admitted when it began
                self._check_room(id, before)

    def delete(self, id: str) -> bool:
        """Remove a response from sight; its items are deleted by `sweep`."""
        return self._discard("responses", id)

    def add_conversation(self, conversation: dict[str, Any], items: Sequence[Item]) -> None:
        id, measured, rows = conversation["id"], measure(items), _rows("input", items)
        with self._change():
            before = self._usage(id)
            self._sql.execute(
                "INSERT INTO conversations (id, created, used, metadata, turns, text) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    id,
                    conversation["created_at"],
                    time.time(),
                    _json(conversation["metadata"]),
                    measured.turns,
                    measured.text,
                ),
            )
            self._add(id, rows)
            self._check_room(id, before)

    def label_conversation(self, id: str, metadata: dict[str, Any]) -> bool:
        with self._change():
            before = self._usage(id)
            found = self._sql.execute(
                "UPDATE conversations SET metadata = ?, used = ? WHERE id = ?",
                (_json(metadata), time.time(), id),
            )
            self._check_room(id, before)
        return found.rowcount > 0

    def delete_conversation(self, id: str) -> bool:
        """Remove a conversation from sight; its items are deleted by `sweep`."""
        return self._discard("conversations", id)

    def extend_conversation(self, id: str, items: Sequence[Item]) -> bool:
        measured, rows = measure(items), _rows("input", items)
        with self._change():
            before = self._usage(id)
            found = self._grow(id, measured)
            if found:
                self._add(id, rows)
                self._check_room(id, before)
        return found

    def shorten_conversation(self, id: str, item: str) -> int:
        """Delete a batch of the items with this id; returns how many there were."""
        return self._freeing(lambda: self._shorten(id, item))

    def _shorten(self, id: str, item: str) -> int:
        with self._change():
            numbers, bodies = self._batch("owner = ? AND id = ?", id, item)
            held = self._measure("conversations", id).minus(measure(map(decode, bodies)))
            self._remove(numbers)
            self._sql.execute(
                "UPDATE conversations SET turns = ?, text = ? WHERE id = ?",
                (held.turns, held.text, id),
            )
        return len(numbers)

    def sweep(self, owner: str | None = None) -> bool:
        """Delete a batch of the items of one discarded owner, or of any; False if none is left."""
        return self._freeing(lambda: self._sweep(owner))

    def _sweep(self, owner: str | None) -> bool:
        with self._change():
            row = self._sql.execute(
                "SELECT owner FROM discarded WHERE ? IS NULL OR owner = ? LIMIT 1", (owner, owner)
            ).fetchone()
            if row is None:
                return False
            numbers, _ = self._batch("owner = ?", row[0])
            self._remove(numbers)
            if not numbers:
                self._sql.execute("DELETE FROM discarded WHERE owner = ?", row)
        return True

    def shrink(self) -> bool:
        """Return a batch of free pages to the disk; False if no more can be returned."""
        before = self._free_pages()
        if before:
            vacuum = f"PRAGMA incremental_vacuum({_SHRINK_PAGES})"
            self._freeing(lambda: self._sql.execute(vacuum).fetchall())
        return 0 < self._free_pages() < before

    def _free_pages(self) -> int:
        (count,) = self._sql.execute("PRAGMA freelist_count").fetchone()
        return int(count)

    def forget(self) -> None:
        """Cut the log, which holds what was deleted until it is written back."""
        try:
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.OperationalError:
            pass  # another server is reading; its next checkpoint does it

    def prune_responses(self, before: Age) -> Age | None:
        """Discard those of a batch of older responses that no other goes back to.

        Returns where the next batch starts; None after the last. What goes back to a response is younger
        than it: from the youngest to the oldest, one pass finds all that can go.
        """
        return self._freeing(lambda: self._prune_responses(before))

    def _prune_responses(self, before: Age) -> Age | None:
        with self._change():
            rows = self._sql.execute(_OLD_RESPONSES, (*before, BATCH_ITEMS)).fetchall()
            for id, _, _ in rows:
                needed = "SELECT 1 FROM responses WHERE previous = ? LIMIT 1"
                if self._sql.execute(needed, (id,)).fetchone() is None:
                    self._hide("responses", id)
        return tuple(rows[-1][1:]) if rows else None

    def prune_conversations(self, before: float) -> bool:
        """Discard a batch of those that were not used since then; False if there are none."""
        return self._freeing(lambda: self._prune_conversations(before))

    def _prune_conversations(self, before: float) -> bool:
        with self._change():
            rows = self._sql.execute(
                "SELECT id FROM conversations WHERE used < ? LIMIT ?", (before, BATCH_ITEMS)
            ).fetchall()
            for (id,) in rows:
                self._hide("conversations", id)
        return bool(rows)

    def cleaning(self, before: float) -> Iterator[None]:
        """Discard all that was not used since then, and delete all that was discarded, step by step."""
        age: Age | None = (before, 0)
        while age is not None:
            age = self.prune_responses(age)
            yield
        while self.prune_conversations(before):
            yield
        while self.sweep():
            yield
        while self.shrink():
            yield

    def settle(self, runs: Callable[[int], bool], error: dict[str, Any]) -> None:
        """Mark as failed what was running in a server that no longer runs."""
        with self._change():
            rows = self._sql.execute(
                "SELECT id, runner, body FROM responses WHERE runner IS NOT NULL"
            ).fetchall()
            for id, runner, body in rows:
                if not runs(runner):
                    ended = decode(body) | {"status": "failed", "error": error}
                    self._sql.execute(
                        "UPDATE responses SET runner = NULL, body = ? WHERE id = ?",
                        (_json(ended), id),
                    )

    def _discard(self, table: str, id: str) -> bool:
        def hide() -> bool:
            with self._change():
                return self._hide(table, id)

        return self._freeing(hide)

    def _freeing(self, work: Callable[[], T]) -> T:
        """Do work that deletes. On a full disk, it is done again with the space of the reserve file."""
        try:
            return work()
        except sqlite3.Error as error:
            if not is_full(error):
                raise
        self.space.release()
        self.forget()
        try:
            try:
                return work()
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
            # Overwriting what is deleted takes as much of the log as that takes itself.
            self._sql.execute("PRAGMA secure_delete = FAST").fetchall()
            return work()
        finally:
            self._sql.execute("PRAGMA secure_delete = ON").fetchall()
            self.forget()
            self.space.restore()

    def _usage(self, id: str) -> StoreUsage:
        """What the caller whose id this is has stored, and all callers together."""
        return usage_of(self._sql, id[-OWNER_LENGTH:])

    def _check_room(self, id: str, before: StoreUsage) -> None:
        """Raise if the transaction so far stores more than is allowed; one that stores less is."""
        usage = self._usage(id)
        if usage.own > before.own:
            self.space.check(usage)

    def _hide(self, table: str, id: str) -> bool:
        """Remove a row, and note that its items are to be deleted."""
        found = self._sql.execute(f"DELETE FROM {table} WHERE id = ?", (id,)).rowcount > 0
        if found:
            self._sql.execute("INSERT OR IGNORE INTO discarded VALUES (?)", (id,))
        return found

    def _batch(self, which: str, *values: str) -> tuple[list[int], list[bytes]]:
        """The numbers and bodies of the next items to be deleted."""
        numbers: list[int] = []
        bodies: list[bytes] = []
        size = 0
        query = f"SELECT number, body FROM items WHERE {which} ORDER BY number LIMIT {BATCH_ITEMS}"
        for number, body in self._sql.execute(query, values):
            numbers.append(number)
            bodies.append(body)
            size += len(body)
            if size > BATCH_BYTES:
                break
        return numbers, bodies

    def _remove(self, numbers: Iterable[int]) -> None:
        self._sql.executemany("DELETE FROM items WHERE number = ?", [(n,) for n in numbers])

    def _add(self, owner: str, rows: list[tuple[str, str, bytes, bool]]) -> None:
        self._sql.executemany(
            "INSERT INTO items (owner, part, id, body, rule) VALUES (?, ?, ?, ?, ?)",
            [(owner, *row) for row in rows],
        )

    def _grow(self, conversation: str, measured: StoredMeasure) -> bool:
        """Note that a conversation is used and gets more items; False if there is none."""
        changed = self._sql.execute(
            "UPDATE conversations SET used = ?, turns = turns + ?, text = text + ? WHERE id = ?",
            (time.time(), measured.turns, measured.text, conversation),
        )
        return changed.rowcount > 0

    def _measure(self, table: str, id: str) -> StoredMeasure:
        query = f"SELECT turns, text FROM {table} WHERE id = ?"
        row = self._sql.execute(query, (id,)).fetchone()
        return StoredMeasure(*row) if row else StoredMeasure()

    def _change(self) -> _Transaction:
        return _Transaction(self._sql)


class _Transaction:
    """Takes the write lock at once: a reader that turns writer cannot wait for another writer."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def __enter__(self) -> None:
        self._sql.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._sql.execute("COMMIT")
        finally:
            roll_back(self._sql)


def _rows(part: str, items: Iterable[Item]) -> list[tuple[str, str, bytes, bool]]:
    return [(part, item["id"], _json(item), is_rule(item)) for item in items]


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
