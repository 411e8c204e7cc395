"""A huge conversation holds up nobody: pages by SQL, bounded jobs, and a queue that is fair by caller."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from api import huge_store
from api.huge_store import COUNT, LINKS

from millrace.api.app import create_app
from millrace.api.context import Context
from millrace.api.responses import reader, sections
from millrace.api.responses.store import Store
from millrace.api.responses.writer import StoreWriter
from millrace.caller import current_caller
from millrace.config import ApiKey, EngineConfig, ServeConfig
from millrace.serving.keys import Keys
from millrace.serving.metrics import Metrics
from millrace.serving.registry import Registry

ANN, BOB = (
    Keys([ApiKey(secret=secret)]).find([secret.encode()]) for secret in ("sk-ann", "sk-bob")
)
assert ANN and BOB
HUGE, SMALL = f"conv_huge_{ANN.id}", f"conv_small_{BOB.id}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("huge") / "store.sqlite"
    huge_store.fill(path, HUGE)
    huge_store.chain(path, ANN.id)
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is decoded from now on."""
    found: list[bytes] = []
    real = reader.decode

    def decode(body: bytes) -> dict[str, Any]:
        found.append(body)
        return real(body)

    monkeypatch.setattr(reader, "decode", decode)
    return found


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Store, httpx.AsyncClient]]:
    """The real application, with two keys and without a model."""
    config = ServeConfig(
        engine=EngineConfig(model="none", name="none"),
        api_keys=(ApiKey(secret="sk-ann"), ApiKey(secret="sk-bob")),
    )
    store = Store(path)
    app = create_app(Context(cast(Registry, None), config, Metrics(), store))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield store, client
    store.close()


def key(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


def test_a_page_of_a_huge_conversation_decodes_that_page_alone(
    file: Path, decoded: list[bytes]
) -> None:
    async def scene() -> None:
        async with served(file) as (store, http):
            steps: list[None] = []
            store._reader._sql.set_progress_handler(lambda: steps.append(None), 1000)

            async def page(query: str) -> tuple[list[int], bool]:
                decoded.clear()
                steps.clear()
                path = f"/v1/conversations/{HUGE}/items?{query}"
                answer = await http.get(path, headers=key("sk-ann"))
                assert answer.status_code == 200, answer.text
                listed = answer.json()
                found = [int(i["id"][1:]) for i in listed["data"]]
                # One more for the conversation's own metadata.
                assert len(decoded) == len(found) + 1
                assert len(steps) < 20, "an index leads to the page"
                if found:
                    assert listed["first_id"] == f"m{found[0]}"
                    assert listed["last_id"] == f"m{found[-1]}"
                return found, listed["has_more"]

            last = COUNT - 1
            assert await page("limit=3") == ([last, last - 1, last - 2], True)
            assert await page("limit=2&order=asc") == ([0, 1], True)
            assert (await page("order=asc&limit=100&after=m120000")) == (
                list(range(120001, 120101)),
                True,
            )
            assert await page("after=m1") == ([0], False)
            assert await page("after=m0") == ([], False)
            assert await page(f"order=asc&limit=2&before=m{last}") == ([last - 2, last - 1], True)
            assert await page("order=asc&limit=5&before=m2") == ([0, 1], False)
            assert await page("limit=2&before=m50") == ([52, 51], True)
            assert await page("order=asc&after=m7&before=m10") == ([8, 9], False)
            assert await page("order=asc&after=m10&before=m7") == ([], False)
            decoded.clear()
            one = await http.get(f"/v1/conversations/{HUGE}/items/m777", headers=key("sk-ann"))
            assert one.json()["id"] == "m777" and len(decoded) == 2
            for name in ("after", "before"):
                missing = await http.get(
                    f"/v1/conversations/{HUGE}/items?{name}=none", headers=key("sk-ann")
                )
                assert missing.status_code == 404 and missing.json()["error"]["param"] == name

    run(scene)


def test_a_page_of_a_long_chain_decodes_that_page_alone(file: Path, decoded: list[bytes]) -> None:
    async def scene() -> None:
        async with served(file) as (_, http):

            async def page(query: str) -> tuple[list[str], bool]:
                decoded.clear()
                path = f"/v1/responses/resp_{LINKS - 1}_{ANN.id}/input_items?{query}"
                listed = (await http.get(path, headers=key("sk-ann"))).json()
                assert len(decoded) == len(listed["data"]) + 1
                return [i["id"] for i in listed["data"]], listed["has_more"]

            n = LINKS - 1
            assert await page("limit=3") == ([f"i{n}", f"o{n - 1}", f"i{n - 1}"], True)
            assert await page("limit=3&order=asc&after=o1") == (["i2", "o2", "i3"], True)
            assert await page("limit=3&after=o1") == (["i1", "o0", "i0"], False)
            assert await page(f"order=asc&after=o{n - 1}") == ([f"i{n}"], False)
            assert await page("order=asc&limit=2&before=i2") == (["i1", "o1"], True)

    run(scene)


def test_a_neighbour_is_served_before_the_rest_of_a_callers_queue(file: Path) -> None:
    async def scene() -> None:
        async with served(file) as (store, http):
            await huge_store.small(store, SMALL)
            order: list[str] = []
            held = threading.Event()
            token = current_caller.set(ANN.id)
            holding = store._reading.submit(held.wait, 60)
            current_caller.reset(token)

            async def get(secret: str, path: str) -> None:
                answer = await http.get(path, headers=key(secret))
                assert answer.status_code == 200, answer.text
                order.append(secret)

            pages = [
                asyncio.create_task(get("sk-ann", f"/v1/conversations/{HUGE}/items?limit=100"))
                for _ in range(20)
            ]
            while len(store._reading._fair) < len(pages):
                await asyncio.sleep(0.001)
            neighbour = asyncio.create_task(get("sk-bob", f"/v1/conversations/{SMALL}"))
            while len(store._reading._fair) < len(pages) + 1:
                await asyncio.sleep(0.001)
            held.set()
            await asyncio.gather(*pages, neighbour)
            assert holding.result(0)
            assert order[0] == "sk-bob" and len(order) == 21
            await store.delete_conversation(SMALL)

    run(scene)


def _items(writer: StoreWriter) -> int:
    return int(writer._sql.execute("SELECT count(*) FROM items").fetchone()[0])


def test_a_huge_conversation_is_deleted_in_bounded_steps_with_others_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite"
    count = 40 * sections.BATCH_ITEMS
    huge_store.fill(path, HUGE, count)
    order: list[str] = []
    real = StoreWriter.sweep

    def sweep(self: StoreWriter, owner: str | None = None) -> bool:
        before = _items(self)
        more = real(self, owner)
        time.sleep(0.02)  # on a fast machine as well, a neighbour comes in time
        assert before - _items(self) <= sections.BATCH_ITEMS
        order.append("swept")
        return more

    monkeypatch.setattr(StoreWriter, "sweep", sweep)

    async def scene() -> None:
        async with served(path) as (_, http):
            order.clear()
            deleting = asyncio.create_task(
                http.delete(f"/v1/conversations/{HUGE}", headers=key("sk-ann"))
            )
            while not order:
                await asyncio.sleep(0)
            gone = await http.get(f"/v1/conversations/{HUGE}", headers=key("sk-ann"))
            assert gone.status_code == 404
            for _ in range(3):
                made = await http.post("/v1/conversations", json={}, headers=key("sk-bob"))
                assert made.status_code == 200
                order.append("bob")
            assert not deleting.done(), "a neighbour's work came between"
            assert (await deleting).status_code == 200
            assert order.count("swept") >= 40
            assert huge_store.items_left(path, HUGE) == 0

    run(scene)


def test_a_deletion_that_was_cut_off_is_finished_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    huge_store.fill(path, HUGE, 1000)
    writer = StoreWriter(path)
    assert writer.delete_conversation(HUGE) and writer.sweep(HUGE)
    writer.close()
    assert huge_store.items_left(path, HUGE) == 1000 - sections.BATCH_ITEMS
    Store(path).close()
    assert huge_store.items_left(path, HUGE) == 0


def test_an_item_with_the_id_of_thousands_is_removed_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    huge_store.fill(path, HUGE, 1000)
    with sqlite3.connect(path) as sql:
        sql.execute("UPDATE items SET id = 'same' WHERE number > 10")

    async def scene() -> None:
        async with served(path) as (_, http):
            one = f"/v1/conversations/{HUGE}/items/same"
            assert (await http.delete(one, headers=key("sk-ann"))).status_code == 200
            assert (await http.delete(one, headers=key("sk-ann"))).status_code == 404
            assert huge_store.items_left(path, HUGE) == 10

    run(scene)


def test_a_request_adds_twenty_items_at_most(tmp_path: Path) -> None:
    items = [{"role": "user", "content": "hi"}]

    async def scene() -> None:
        async with served(tmp_path / "store.sqlite") as (_, http):

            async def post(path: str, count: int) -> httpx.Response:
                return await http.post(path, json={"items": items * count}, headers=key("sk-ann"))

            made = await post("/v1/conversations", 20)
            assert made.status_code == 200, made.text
            more = f"/v1/conversations/{made.json()['id']}/items"
            assert (await post(more, 20)).status_code == 200
            for path in ("/v1/conversations", more):
                refused = await post(path, 21)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "items"
                assert "20" in refused.json()["error"]["message"]

    run(scene)
