"""Stored responses for the event loop: every call runs in the store's one thread.

Knows when to throw old things away, and what to say when storing is switched off or fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from millrace.api.responses.database import Database, Item
from millrace.api.responses.ids import owner
from millrace.config import home
from millrace.errors import BadRequest, NotFound, RequestFailed, SetupError

log = logging.getLogger("millrace.api")
T = TypeVar("T")

PRUNE_EVERY = 3600.0
LOST = {"code": "server_error", "message": "The server ended before this response was finished."}


def open_store(path: str | None, days: int) -> Store:
    """The store at a path; `none` is no store, and None the usual place in the user's folder."""
    if path == "none":
        return Store()
    place = Path(path).expanduser() if path else home() / "responses.sqlite"
    try:
        return Store(place, days)
    except (OSError, sqlite3.Error) as error:
        if path:
            raise SetupError(f"--store {path} cannot be used: {error}.") from error
        log.warning("responses are not stored: %s: %s", place, error)
        return Store()


class Store:
    """Without a path, nothing is stored."""

    def __init__(self, path: Path | None = None, days: int = 30) -> None:
        self._days = days
        self._pruned = 0.0
        self._thread = ThreadPoolExecutor(1, "millrace-store") if path else None
        if self._thread and path:
            try:
                self._database = self._thread.submit(self._open, path).result()
            except BaseException:
                self._thread.shutdown()
                raise

    @property
    def on(self) -> bool:
        return self._thread is not None

    def close(self) -> None:
        if self._thread:
            self._thread.submit(self._database.close)
            self._thread.shutdown()

    def demand(self, param: str) -> None:
        """Raise if nothing is stored here."""
        if not self.on:
            raise BadRequest(
                f"'{param}' needs stored responses, and this server stores none (--store none).",
                param=param,
            )

    async def put(
        self,
        response: dict[str, Any],
        given: list[Item],
        *,
        running: bool = False,
        events: bytes | None = None,
        conversation: str | None = None,
    ) -> None:
        def work(database: Database) -> None:
            database.put(
                response,
                given,
                runner=os.getpid() if running else None,
                events=events,
                conversation=conversation,
            )
            if time.time() - self._pruned > PRUNE_EVERY:
                self._prune(database)

        await self._do(work)

    async def response(self, id: str) -> dict[str, Any]:
        found = await self._do(lambda d: d.response(id)) if self.on else None
        if found is None:
            raise NotFound(f"There is no response '{id}' here.", param="response_id")
        return found

    async def input(self, id: str) -> list[Item]:
        """What a response was given itself, without what it goes back to."""
        return await self._do(lambda d: d.input(id))

    async def events(self, id: str) -> bytes | None:
        return await self._do(lambda d: d.events(id))

    async def chain(self, id: str) -> list[Item]:
        self.demand("previous_response_id")
        return await self._do(lambda d: d.chain(id))

    async def delete(self, id: str) -> bool:
        return self.on and await self._do(lambda d: d.delete(id))

    async def item(self, id: str, caller: str) -> Item:
        self.demand("item_reference")
        found = await self._do(lambda d: d.item(id, owner(caller)))
        if found is None:
            raise NotFound(f"There is no item '{id}' here.", param="input")
        return found

    async def add_conversation(self, conversation: dict[str, Any], items: list[Item]) -> None:
        self.demand("conversation")
        await self._do(lambda d: d.add_conversation(conversation, items))

    async def conversation(self, id: str) -> dict[str, Any]:
        self.demand("conversation")
        found = await self._do(lambda d: d.conversation(id))
        if found is None:
            raise NotFound(f"There is no conversation '{id}' here.", param="conversation")
        return conversation_object(id, *found)

    async def label_conversation(self, id: str, metadata: dict[str, Any]) -> bool:
        return await self._do(lambda d: d.label_conversation(id, metadata))

    async def delete_conversation(self, id: str) -> bool:
        self.demand("conversation")
        return await self._do(lambda d: d.delete_conversation(id))

    async def conversation_items(self, id: str) -> list[Item]:
        return await self._do(lambda d: d.conversation_items(id))

    async def extend_conversation(self, id: str, items: list[Item]) -> bool:
        return await self._do(lambda d: d.extend_conversation(id, items))

    async def shorten_conversation(self, id: str, item: str) -> bool:
        return await self._do(lambda d: d.shorten_conversation(id, item))

    def _open(self, path: Path) -> Database:
        database = Database(path)
        database.settle(_runs_elsewhere, LOST)
        self._prune(database)
        return database

    def _prune(self, database: Database) -> None:
        self._pruned = time.time()
        database.prune(self._pruned - self._days * 86400)

    async def _do(self, work: Callable[[Database], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: work(self._database))
        except sqlite3.Error as error:
            log.error("the response store failed: %s", error)
            raise RequestFailed(f"The response store failed: {error}.") from error


def conversation_object(id: str, created: int, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "object": "conversation", "created_at": created, "metadata": metadata}


def _runs_elsewhere(pid: int) -> bool:
    """Whether another server may still be at work; a response under our own id is from before."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
