"""The file behind stored responses: SQLite, and all the SQL there is.

Blocking, and used from one thread only; `store.py` is how the rest of the server reaches it. Items
and responses are kept as the JSON that clients see.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace.errors import PreviousResponseNotFound, SetupError

Item = dict[str, Any]
Part = Literal["input", "output"]

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, created REAL NOT NULL, previous TEXT, runner INTEGER,
    body BLOB NOT NULL, events BLOB
);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, used REAL NOT NULL, metadata BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, part TEXT NOT NULL, id TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_of ON items (owner, number);
CREATE INDEX IF NOT EXISTS items_by_id ON items (id);
"""
_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
)
"""
# What a younger response builds on is as young as that response.
_PRUNE = """
WITH RECURSIVE kept (id, previous) AS (
    SELECT id, previous FROM responses WHERE created >= ?
    UNION
    SELECT r.id, r.previous FROM responses r JOIN kept ON r.id = kept.previous
)
DELETE FROM responses WHERE id NOT IN (SELECT id FROM kept)
"""
_ORPHANS = """
DELETE FROM items WHERE owner NOT IN (SELECT id FROM responses)
    AND owner NOT IN (SELECT id FROM conversations)
"""


class Database:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What people said to a model is nobody else's business on a shared machine.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._sql = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._sql.execute("PRAGMA busy_timeout = 30000")
        self._sql.execute("PRAGMA secure_delete = ON")
        (version,) = self._sql.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            self._sql.close()
            raise SetupError(f"--store {path} was written by a newer millrace.")
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = NORMAL")
        self._sql.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = 1; COMMIT;")

    def close(self) -> None:
        self._sql.close()

    def put(
        self,
        response: dict[str, Any],
        given: Iterable[Item],
        *,
        runner: int | None = None,
        events: bytes | None = None,
        conversation: str | None = None,
    ) -> None:
        """Keep a response with its own input, or replace it; add both to a conversation, if named."""
        id, body = response["id"], {k: v for k, v in response.items() if k != "output"}
        row = (id, time.time(), response["previous_response_id"], runner, _json(body), events)
        items = [("input", i) for i in given] + [("output", i) for i in response["output"]]
        with self._change():
            self._sql.execute("DELETE FROM items WHERE owner = ?", (id,))
            self._sql.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            self._add(id, items)
            if conversation is not None and self._touch(conversation):
                self._add(conversation, items)

    def response(self, id: str) -> dict[str, Any] | None:
        row = self._sql.execute("SELECT body FROM responses WHERE id = ?", (id,)).fetchone()
        return None if row is None else _read(row[0]) | {"output": self._items(id, "output")}

    def input(self, id: str) -> list[Item]:
        return self._items(id, "input")

    def events(self, id: str) -> bytes | None:
        row = self._sql.execute("SELECT events FROM responses WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    def chain(self, id: str) -> list[Item]:
        """All that was said up to a response and by it, oldest first."""
        links = self._sql.execute(_CHAIN + "SELECT id, previous FROM chain ORDER BY depth", (id,))
        links_found = links.fetchall()
        if not links_found:
            raise PreviousResponseNotFound(id)
        if (missing := links_found[-1][1]) is not None:
            raise PreviousResponseNotFound(missing, f"'{id}' goes back to it.")
        found = self._sql.execute(
            _CHAIN + "SELECT body FROM chain JOIN items ON owner = chain.id "
            "ORDER BY depth DESC, number",
            (id,),
        )
        return [_read(body) for (body,) in found]

    def delete(self, id: str) -> bool:
        with self._change():
            gone = self._sql.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount > 0
            self._sql.execute("DELETE FROM items WHERE owner = ?", (id,))
        self._forget()
        return gone

    def item(self, id: str, whose: str) -> Item | None:
        """A stored item by its id, whichever of someone's responses or conversations it came with."""
        row = self._sql.execute(
            "SELECT body FROM items WHERE id = ? AND substr(owner, -length(?)) = ? "
            "ORDER BY number LIMIT 1",
            (id, whose, whose),
        ).fetchone()
        return None if row is None else _read(row[0])

    def add_conversation(self, conversation: dict[str, Any], items: Iterable[Item]) -> None:
        id, created = conversation["id"], conversation["created_at"]
        metadata = _json(conversation["metadata"])
        with self._change():
            self._sql.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?)",
                (id, created, time.time(), metadata),
            )
            self._add(id, [("input", i) for i in items])

    def conversation(self, id: str) -> tuple[int, dict[str, Any]] | None:
        """When it was made, and its metadata."""
        row = self._sql.execute(
            "SELECT created, metadata FROM conversations WHERE id = ?", (id,)
        ).fetchone()
        return None if row is None else (row[0], _read(row[1]))

    def label_conversation(self, id: str, metadata: dict[str, Any]) -> bool:
        with self._change():
            found = self._sql.execute(
                "UPDATE conversations SET metadata = ?, used = ? WHERE id = ?",
                (_json(metadata), time.time(), id),
            )
        return found.rowcount > 0

    def delete_conversation(self, id: str) -> bool:
        with self._change():
            gone = self._sql.execute("DELETE FROM conversations WHERE id = ?", (id,)).rowcount > 0
            self._sql.execute("DELETE FROM items WHERE owner = ?", (id,))
        self._forget()
        return gone

    def conversation_items(self, id: str) -> list[Item]:
        return self._items(id)

    def extend_conversation(self, id: str, items: Iterable[Item]) -> bool:
        with self._change():
            found = self._touch(id)
            if found:
                self._add(id, [("input", i) for i in items])
        return found

    def shorten_conversation(self, id: str, item: str) -> bool:
        with self._change():
            found = self._sql.execute("DELETE FROM items WHERE owner = ? AND id = ?", (id, item))
        self._forget()
        return found.rowcount > 0

    def prune(self, before: float) -> None:
        """Drop what has not been used since then."""
        with self._change():
            self._sql.execute(_PRUNE, (before,))
            self._sql.execute("DELETE FROM conversations WHERE used < ?", (before,))
            self._sql.execute(_ORPHANS)

    def settle(self, runs: Callable[[int], bool], error: dict[str, Any]) -> None:
        """Mark as failed what was running in a server that no longer runs."""
        with self._change():
            rows = self._sql.execute(
                "SELECT id, runner, body FROM responses WHERE runner IS NOT NULL"
            ).fetchall()
            for id, runner, body in rows:
                if not runs(runner):
                    ended = _read(body) | {"status": "failed", "error": error}
                    self._sql.execute(
                        "UPDATE responses SET runner = NULL, body = ? WHERE id = ?",
                        (_json(ended), id),
                    )

    def _items(self, owner: str, part: Part | None = None) -> list[Item]:
        found = self._sql.execute(
            "SELECT body FROM items WHERE owner = ? AND (? IS NULL OR part = ?) ORDER BY number",
            (owner, part, part),
        )
        return [_read(body) for (body,) in found]

    def _add(self, owner: str, items: Iterable[tuple[str, Item]]) -> None:
        self._sql.executemany(
            "INSERT INTO items (owner, part, id, body) VALUES (?, ?, ?, ?)",
            [(owner, part, item["id"], _json(item)) for part, item in items],
        )

    def _touch(self, conversation: str) -> bool:
        change = "UPDATE conversations SET used = ? WHERE id = ?"
        return self._sql.execute(change, (time.time(), conversation)).rowcount > 0

    def _forget(self) -> None:
        """The log, too, holds what was deleted, until it is written back and cut."""
        try:
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError:
            pass  # another server is reading; its next checkpoint does it

    def _change(self) -> _Transaction:
        return _Transaction(self._sql)


class _Transaction:
    """Takes the write lock at once: a reader that turns writer cannot wait for another writer."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def __enter__(self) -> None:
        self._sql.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sql.execute("COMMIT" if kind is None else "ROLLBACK")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _read(body: bytes) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(body)
    return value
