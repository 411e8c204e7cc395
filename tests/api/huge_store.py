"""A store file with a huge conversation and a long chain, written by SQL in a second or two."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from millrace.api.responses.store import Store, conversation_object
from millrace.api.responses.tables import open_writer

COUNT = 240_000
LINKS = 3_000


def message(id: str, text: str, role: str = "user") -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"id": id, "type": "message", "status": "completed", "role": role, "content": [part]}


def fill(path: Path, conversation: str, count: int = COUNT, *, measured: bool = True) -> None:
    """A conversation of users' messages `m0`, `m1`, … ; not `measured` as files of version 1 have it."""
    before, after = json.dumps(message("@", "hello @"), separators=(",", ":")).split("@", 1)
    middle, end = after.split("@")
    with closing(open_writer(path)) as sql:
        sql.execute("BEGIN")
        turns = (count, 5 * count) if measured else (0, 0)
        sql.execute(
            "INSERT INTO conversations (id, created, used, metadata, turns, text) "
            "VALUES (?, 1, ?, CAST('{}' AS BLOB), ?, ?)",
            (conversation, time.time(), *turns),
        )
        sql.execute(
            "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT ?) "
            "INSERT INTO items (owner, part, id, body, rule) "
            "SELECT ?, 'input', 'm' || i, CAST(? || 'm' || i || ? || i || ? AS BLOB), ? FROM n",
            (count, conversation, before, middle, end, 0 if measured else None),
        )
        sql.execute("COMMIT")


def chain(path: Path, owner: str, links: int = LINKS) -> str:
    """A chain of responses `resp_0…`, each with one item of input and one of output; the last one's id."""
    with closing(open_writer(path)) as sql:
        sql.execute("BEGIN")
        for n in range(links):
            id, previous = f"resp_{n}_{owner}", f"resp_{n - 1}_{owner}" if n else None
            body = {"id": id, "status": "completed", "previous_response_id": previous}
            sql.execute(
                "INSERT INTO responses (id, created, previous, body) VALUES (?, ?, ?, ?)",
                (id, time.time(), previous, json.dumps(body).encode()),
            )
            for part, role in (("input", "user"), ("output", "assistant")):
                said = json.dumps(message(f"{part[0]}{n}", "hi", role)).encode()
                sql.execute(
                    "INSERT INTO items (owner, part, id, body, rule) VALUES (?, ?, ?, ?, 0)",
                    (id, part, f"{part[0]}{n}", said),
                )
        sql.execute("COMMIT")
    return id


async def small(store: Store, id: str) -> None:
    """A conversation of one item."""
    await store.add_conversation(conversation_object(id, 1, {}), [message("only", "hi")])


def items_left(path: Path, owner: str) -> int:
    with closing(sqlite3.connect(path)) as sql:
        (count,) = sql.execute("SELECT COUNT(*) FROM items WHERE owner = ?", (owner,)).fetchone()
    return int(count)
