"""Store files of earlier versions: upgraded step by step, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from api.huge_store import items_left, message

from millrace.api.responses import tables
from millrace.api.responses.sections import Section
from millrace.api.responses.store import Store

VERSION_1 = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, created REAL NOT NULL, previous TEXT, runner INTEGER,
    body BLOB NOT NULL, events BLOB
);
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, used REAL NOT NULL, metadata BLOB NOT NULL
);
CREATE TABLE items (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, part TEXT NOT NULL, id TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX items_of ON items (owner, number);
CREATE INDEX items_by_id ON items (id);
PRAGMA user_version = 1;
"""


def _old(path: Path) -> None:
    """A file as version 1 left it: two responses, a conversation, and the items of nothing."""

    def blob(value: dict[str, Any]) -> bytes:
        return json.dumps(value).encode()

    with closing(sqlite3.connect(path)) as sql, sql:
        sql.executescript(VERSION_1)
        for id, previous in (("resp_a", None), ("resp_b", "resp_a")):
            body = {"id": id, "previous_response_id": previous, "status": "completed"}
            row = (id, time.time(), previous, None, blob(body), None)
            sql.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
        row = ("conv_c", 5, time.time(), blob({"a": "b"}))
        sql.execute("INSERT INTO conversations VALUES (?, ?, ?, ?)", row)
        for owner in ("resp_a", "resp_b", "conv_c", "orphan"):
            for part in ("input", "output"):
                said = blob(message(f"{part}_{owner}", "hi"))
                sql.execute(
                    "INSERT INTO items (owner, part, id, body) VALUES (?, ?, ?, ?)",
                    (owner, part, f"{part}_{owner}", said),
                )


def _version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as sql:
        return int(sql.execute("PRAGMA user_version").fetchone()[0])


def test_a_file_of_version_1_is_upgraded_with_all_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    _old(path)

    async def scene() -> None:
        store = Store(path)
        assert _version(path) == tables.VERSION == 3
        assert items_left(path, "orphan") == 0, "items without an owner are deleted"
        found = await store.response("resp_b")
        assert [i["id"] for i in found["output"]] == ["output_resp_b"]
        chain = await store.chain("resp_b")
        batch = await store.batch(chain, newest_first=False, most=10)
        assert [i["id"] for i in batch.items] == [
            "input_resp_a", "output_resp_a", "input_resp_b", "output_resp_b",
        ]  # fmt: skip
        talk = await store.conversation("conv_c")
        assert (talk.created, talk.metadata) == (5, {"a": "b"})
        await store.extend_conversation("conv_c", [message("new", "hi")])
        batch = await store.batch([Section("conv_c")], newest_first=False, most=10)
        assert [i["id"] for i in batch.items] == ["input_conv_c", "output_conv_c", "new"]
        await store.shorten_conversation("conv_c", "input_conv_c")
        later = {"id": "resp_c", "previous_response_id": "resp_b", "output": []}
        await store.put(later, [message("in_c", "hi")])
        assert len(await store.chain("resp_c")) == 3
        assert await store.delete("resp_b") and items_left(path, "resp_b") == 0
        store.close()

    asyncio.run(scene())
    Store(path).close()
    assert _version(path) == 3


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite"
    _old(path)
    broken = (tables._STEPS[0], tables._STEPS[1] + "CREATE INDEX broken ON nothing (id);", "")
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_STEPS", broken)
        with pytest.raises(sqlite3.OperationalError):
            Store(path)
    assert _version(path) == 1
    with closing(sqlite3.connect(path)) as sql:
        (columns,) = sql.execute("SELECT COUNT(*) FROM pragma_table_info('items')").fetchone()
    assert columns == 5
    Store(path).close()
    assert _version(path) == 3
