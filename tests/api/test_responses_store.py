"""What is kept of responses, and what is dropped: the store, its file, and shortened conversations."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from millrace.api.responses.items import read_items
from millrace.api.responses.reader import StoreReader
from millrace.api.responses.sections import Section
from millrace.api.responses.store import LOST, Store, open_store
from millrace.api.responses.truncation import shortest_cut, without
from millrace.api.responses.writer import StoreWriter
from millrace.errors import (
    BadRequest,
    MillraceError,
    NotFound,
    PreviousResponseNotFound,
    SetupError,
)


def test_truncation_drops_the_oldest_and_keeps_the_rules() -> None:
    items = read_items(
        [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": "one"},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"role": "user", "content": "two"},
            {"type": "function_call_output", "call_id": "a", "output": "late"},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ]
    )

    def words(kept: Any) -> list[str]:
        return [i["content"][0]["text"] if "content" in i else i["type"] for i in kept]

    assert words(without(items, 3)) == ["rules", "two", "three", "four"], "no lonely result"
    assert shortest_cut(items, words, lambda w: len(w) <= 5) == ["rules", "two", "three", "four"]
    assert shortest_cut(items, words, lambda w: len(w) <= 2) == ["rules", "four"]
    assert shortest_cut(items, words, lambda w: len(w) <= 1) is None


def _response(id: str, previous: str | None = None, **more: Any) -> dict[str, Any]:
    message = {"id": f"msg_{id}", "type": "message", "role": "assistant", "content": []}
    kept = {"id": id, "previous_response_id": previous, "status": "completed"}
    return kept | {"output": [message]} | more


def _given(id: str) -> list[dict[str, Any]]:
    return [{"id": f"in_{id}", "type": "message", "role": "user", "content": []}]


def test_chains_are_kept_and_what_nothing_was_built_on_is_pruned(tmp_path: Path) -> None:
    async def scene() -> None:
        file = tmp_path / "new" / "store.sqlite"
        store = Store(file)
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        previous = None
        for id in ("a", "b", "c"):
            await store.put(_response(id, previous), _given(id))
            previous = id
        await store.put(_response("alone"), _given("alone"))
        chain = [Section("a"), Section("b"), Section("c")]
        assert await store.chain("c") == chain
        batch = await store.batch(chain, newest_first=False, most=10)
        assert [i["id"] for i in batch.items] == [
            "in_a", "msg_a", "in_b", "msg_b", "in_c", "msg_c",
        ]  # fmt: skip
        assert await store.item("msg_b", "b") and await store.item("in_c", "c")
        for id, whose in (("nope", "b"), ("msg_b", "c")):
            with pytest.raises(NotFound):
                await store.item(id, whose)
        store.close()
        with closing(sqlite3.connect(file)) as sql, sql:
            sql.execute("UPDATE responses SET created = 1 WHERE id IN ('a', 'b', 'alone')")
        store = Store(file, days=1)
        with pytest.raises(NotFound):
            await store.response("alone")
        with pytest.raises(NotFound):
            await store.item("msg_alone", "alone")
        assert await store.chain("c") == chain, "what a young response builds on is kept"
        assert await store.delete("a")
        with pytest.raises(PreviousResponseNotFound, match="'a'"):
            await store.chain("c")
        with pytest.raises(PreviousResponseNotFound, match="'x'"):
            await store.chain("x")
        store.close()

    asyncio.run(scene())


def test_what_ran_in_a_server_that_died_has_failed(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s.sqlite")
    writer.put(_response("dead", status="in_progress"), [], runner=1)
    writer.put(_response("alive", status="in_progress"), [], runner=2)
    writer.settle(lambda pid: pid == 2, LOST)
    reader = StoreReader(tmp_path / "s.sqlite")
    dead, alive = reader.response("dead"), reader.response("alive")
    assert dead and (dead["status"], dead["error"]) == ("failed", LOST)
    assert alive and alive["status"] == "in_progress"


def test_a_newer_file_and_no_file_are_told(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "s.sqlite")) as sql:
        sql.execute("PRAGMA user_version = 99")
    with pytest.raises(SetupError, match="newer"):
        open_store(str(tmp_path / "s.sqlite"), 30)
    (tmp_path / "text").write_text("no database, and long enough to be told apart from one" * 9)
    with pytest.raises(SetupError, match="--store"):
        open_store(str(tmp_path / "text"), 30)


def test_without_a_store_ids_are_refused_clearly() -> None:
    store = open_store("none", 30)
    assert not store.on
    with pytest.raises(BadRequest, match="--store none"):
        asyncio.run(store.chain("resp_1"))
    with pytest.raises(NotFound):
        asyncio.run(store.response("resp_1"))


def test_a_store_that_fails_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.sqlite")
    store._writer.close()
    with pytest.raises(MillraceError, match="store failed"):
        asyncio.run(store.put(_response("a"), []))
