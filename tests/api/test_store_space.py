"""Room for stored responses: limits by key, and a disk that is full or fills up."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from api.huge_store import message

from millrace.api.responses import space
from millrace.api.responses.reader import StoreReader
from millrace.api.responses.space import StoreUsage
from millrace.api.responses.store import Store, conversation_object
from millrace.errors import InsufficientStorage, NotFound, StorageUnavailable

ANN, BOB = "a" * 16, "b" * 16


def _response(id: str, caller: str = ANN, size: int = 0) -> dict[str, Any]:
    said = message(f"msg_{id}", "x" * size, "assistant")
    return {"id": f"resp_{id}{caller}", "previous_response_id": None, "output": [said]}


def _conversation(id: str, caller: str = ANN) -> dict[str, Any]:
    return conversation_object(f"conv_{id}{caller}", 1, {})


def _usage(store: Store, caller: str) -> StoreUsage:
    return store._reader.usage(caller)


def _recounted(path: Path) -> int:
    """What all rows take, counted anew."""
    sizes = (
        ("responses", "length(body) + coalesce(length(events), 0)"),
        ("conversations", "length(metadata)"),
        ("items", "length(body)"),
    )
    with closing(sqlite3.connect(path)) as sql:
        return sum(
            sql.execute(f"SELECT coalesce(sum({size} + 400), 0) FROM {table}").fetchone()[0]
            for table, size in sizes
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def full(path: Path) -> Iterator[Store]:
    """A store whose file cannot grow, filled with responses of one caller."""
    store = Store(path)
    store._writer._sql.execute("PRAGMA max_page_count = 200").fetchall()

    async def fill() -> None:
        for number in range(100):
            await store.put(_response(str(number), size=20_000), [])

    with pytest.raises(InsufficientStorage, match="full"):
        asyncio.run(fill())
    yield store
    store.close()


def test_usage_follows_every_change(path: Path) -> None:
    async def scene() -> None:
        store = Store(path)
        await store.put(_response("1", size=100), [message("in", "hi")], running=True)
        await store.put(_response("1", size=900), [message("in", "hi")], events=b"e" * 50)
        await store.put(_response("2", BOB), [])
        await store.add_conversation(_conversation("c"), [message("m", "hi")])
        await store.extend_conversation(f"conv_c{ANN}", [message("n", "you")])
        await store.label_conversation(f"conv_c{ANN}", {"a": "b" * 99})
        await store.shorten_conversation(f"conv_c{ANN}", "m")
        ann, bob = _usage(store, ANN), _usage(store, BOB)
        assert ann.own > bob.own > 0
        assert ann.own + bob.own == ann.total == bob.total == _recounted(path)
        await store.delete_conversation(f"conv_c{ANN}")
        await store.delete(f"resp_1{ANN}")
        assert _usage(store, ANN) == StoreUsage(0, bob.own)
        store.close()

    asyncio.run(scene())


def test_one_key_cannot_take_anothers_room(path: Path) -> None:
    async def scene() -> None:
        store = Store(path, limit=200_000, keys=2)
        await store.put(_response("1", size=90_000), [])
        with pytest.raises(InsufficientStorage, match=r"--store-limit 200 kB divided by 2 keys"):
            await store.put(_response("2", size=20_000), [])
        with pytest.raises(InsufficientStorage):
            await store.add_conversation(_conversation("c"), [message("m", "x" * 20_000)])
        with pytest.raises(InsufficientStorage):
            await store.check_room(ANN, lambda: 20_000)
        with pytest.raises(NotFound):
            await store.response(f"resp_2{ANN}")
        assert (await store.response(f"resp_1{ANN}"))["output"], "nothing is dropped for it"
        await store.check_room(BOB, lambda: 90_000)
        await store.put(_response("3", BOB, size=90_000), [])
        await store.delete(f"resp_1{ANN}")
        await store.put(_response("2", size=20_000), [])
        store.close()

    asyncio.run(scene())


def test_a_limit_that_was_lowered_still_lets_shrink(path: Path) -> None:
    async def scene() -> None:
        store = Store(path)
        items = [message("m", "x" * 5000), message("n", "hi")]
        await store.add_conversation(_conversation("c"), items)
        await store.label_conversation(f"conv_c{ANN}", {"a": "b" * 99})
        store.close()
        store = Store(path, limit=1000)
        await store.label_conversation(f"conv_c{ANN}", {"a": "b"})
        with pytest.raises(InsufficientStorage):
            await store.label_conversation(f"conv_c{ANN}", {"a": "b" * 50})
        await store.shorten_conversation(f"conv_c{ANN}", "m")
        store.close()

    asyncio.run(scene())


def test_a_background_response_that_was_admitted_is_kept(path: Path) -> None:
    async def scene() -> None:
        store = Store(path, limit=2000)
        await store.put(_response("1"), [], running=True)
        await store.put(_response("1", size=5000), [])
        assert (await store.response(f"resp_1{ANN}"))["output"]
        store.close()

    asyncio.run(scene())


def test_a_full_file_says_why_and_takes_responses_again_after_a_deletion(full: Store) -> None:
    async def scene() -> None:
        for _ in range(3):  # the same error each time, and no transaction is left open
            with pytest.raises(InsufficientStorage, match="database or disk is full"):
                await full.put(_response("more", size=200_000), [])
        with pytest.raises(InsufficientStorage, match="database or disk is full"):
            await full.add_conversation(_conversation("c"), [message("m", "x" * 200_000)])
        assert await full.delete(f"resp_0{ANN}") and await full.delete(f"resp_1{ANN}")
        await full.put(_response("more", size=20_000), [])
        assert (await full.response(f"resp_more{ANN}"))["output"]

    asyncio.run(scene())


def test_little_free_disk_space_is_refused_before_anything_is_done(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(path)
    asyncio.run(store.check_room(ANN, lambda: 10))
    asyncio.run(store.add_conversation(_conversation("c"), []))
    usage = type(shutil.disk_usage("/"))(1 << 40, 1 << 40, 1 << 20)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InsufficientStorage, match=r"has 1.0 MB free, and \d+ MB of it"):
        asyncio.run(store.check_room(ANN, lambda: 10))
    with pytest.raises(InsufficientStorage):
        asyncio.run(store.add_conversation(_conversation("d"), []))
    with pytest.raises(InsufficientStorage):
        asyncio.run(store.extend_conversation(f"conv_c{ANN}", [message("m", "hi")]))
    asyncio.run(store.delete_conversation(f"conv_c{ANN}"))
    store.close()


def test_a_file_shrinks_when_responses_are_deleted(path: Path) -> None:
    store = Store(path)

    async def fill() -> None:
        for number in range(20):
            await store.put(_response(str(number), size=200_000), [])

    async def clear() -> None:
        for number in range(20):
            await store.delete(f"resp_{number}{ANN}")

    asyncio.run(fill())
    store._writer.forget()
    grown = path.stat().st_size
    assert grown > 3_000_000
    asyncio.run(clear())
    assert path.stat().st_size < grown // 10
    assert not path.with_name(path.name + "-wal").stat().st_size
    store.close()


def test_a_broken_store_is_unavailable(path: Path) -> None:
    store = Store(path)
    store._writer.close()
    with pytest.raises(StorageUnavailable, match="store failed"):
        asyncio.run(store.put(_response("1"), []))


def test_a_file_of_version_2_is_counted(path: Path) -> None:
    store = Store(path)
    asyncio.run(store.put(_response("1", size=99), [message("in", "hi")]))
    counted = _usage(store, ANN)
    store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as sql:
        names = sql.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            sql.execute(f"DROP TRIGGER {name}")
        sql.execute("DROP TABLE usage")
        sql.execute("PRAGMA user_version = 2")
        sql.execute("PRAGMA journal_mode = DELETE").fetchall()
        sql.execute("PRAGMA auto_vacuum = NONE")
        sql.execute("VACUUM")
    store = Store(path)
    assert len(names) == 9 and _usage(store, ANN) == counted
    assert store._writer._sql.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    store.close()
    with closing(StoreReader(path)) as reader:
        assert reader.usage(ANN) == counted
