"""Stored responses and conversations, without a server: what two do at once, and what is off the loop."""

from __future__ import annotations

import asyncio
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request

from millrace.api.body_budget import BodyBudget
from millrace.api.responses import conversations, jobs, stored
from millrace.api.responses.jobs import BackgroundJob, Jobs
from millrace.api.responses.plan import ResponsePlan
from millrace.api.responses.reader import StoredConversation
from millrace.api.responses.store import Store, conversation_object
from millrace.errors import NotFound
from millrace.serving.running import Running


def _asked(store: Store, body: object = None, query: bytes = b"") -> Request:
    config = SimpleNamespace(max_body=1 << 20, keep_alive=5.0)
    bodies = BodyBudget(1 << 20, 1 << 20)
    context = SimpleNamespace(store=store, config=config, jobs=Jobs(), bodies=bodies)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [],
        "query_string": query,
        "app": SimpleNamespace(state=SimpleNamespace(context=context)),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}

    return Request(scope, receive)


class _Vanishing(Store):
    """Conversations are deleted the moment after somebody has looked at them."""

    async def conversation(self, id: str) -> StoredConversation:
        found = await super().conversation(id)
        await self.delete_conversation(id)
        return found


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (conversations.add, {"items": [{"role": "user", "content": "Hi"}]}),
        (conversations.update, {"metadata": {"a": "b"}}),
    ],
)
def test_what_is_written_to_a_conversation_that_was_just_deleted_is_not_said_to_be_kept(
    tmp_path: Path, route: Any, body: object
) -> None:
    async def scene() -> None:
        store = _Vanishing(tmp_path / "store.sqlite")
        await store.add_conversation(conversation_object("conv_1", 1, {}), [])
        with pytest.raises(NotFound):
            await route(_asked(store, body), "conv_1")
        store.close()

    asyncio.run(scene())


class _Kept(Store):
    def __init__(self) -> None:
        super().__init__()
        self.kept = b""

    async def put(self, response: Any, given: Any, **more: Any) -> None:
        self.kept = more["events"]

    async def response(self, id: str) -> dict[str, Any]:
        return {"id": id}

    async def events(self, id: str) -> bytes | None:
        return self.kept


def test_the_events_of_a_long_response_are_packed_and_unpacked_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where: list[int] = []

    def noted(work: Any) -> Any:
        def run(*given: Any) -> Any:
            where.append(threading.get_ident())
            return work(*given)

        return run

    packing = SimpleNamespace(compress=noted(zlib.compress), decompress=noted(zlib.decompress))
    monkeypatch.setattr(jobs, "zlib", packing)
    machine = SimpleNamespace(response=lambda: {"id": "resp_1"}, error=None)
    plan = SimpleNamespace(machine=lambda id: machine, given=[], conversation=None)

    async def scene() -> list[bytes]:
        store = _Kept()
        job = BackgroundJob("resp_1", cast(ResponsePlan, plan), cast(Running, None), store)
        job._tell([{"type": "first"}, {"type": "second"}])
        await job._save([{"type": "last"}])
        answer: Any = await stored.get(_asked(store, query=b"stream=true"), "resp_1")
        return [chunk async for chunk in answer.body_iterator]

    told = asyncio.run(scene())
    assert [event.split(b"\n")[0] for event in told] == [
        b"event: first",
        b"event: second",
        b"event: last",
    ]
    assert len(where) == 2 and threading.get_ident() not in where
