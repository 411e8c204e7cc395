"""Stored responses for the event loop: every call is one or more jobs on the store's threads.

One thread writes and one reads, each with its own connection; a job sees every change that was made before
it was submitted. Both queues are fair by caller, and no job does more than a bounded amount of work: what
takes longer is several jobs, so that other callers' jobs run between them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from millrace.api.responses.ids import owner
from millrace.api.responses.reader import StoredConversation, StoredResponse, StoreReader
from millrace.api.responses.sections import BATCH_ITEMS, Cursor, Item, ItemBatch, Section, Sections
from millrace.api.responses.space import StoreUsage, is_full
from millrace.api.responses.writer import StoreWriter
from millrace.config import home
from millrace.errors import (
    BadRequest,
    InsufficientStorage,
    NotFound,
    PreviousResponseNotFound,
    SetupError,
    StorageUnavailable,
)
from millrace.fair_executor import FairExecutor

log = logging.getLogger("millrace.api")
T = TypeVar("T")

PRUNE_EVERY = 3600.0
LOST = {"code": "server_error", "message": "The server ended before this response was finished."}
_READ, _WRITE = 20e-6, 100e-6
"""Seconds that an item is expected to take."""
_WAITING_PER_CALLER, _WAITING = 1024, 16384
"""Jobs that may wait. A request has one at a time, so these bound requests."""


def open_store(path: str | None, days: int, limit: int | None = None, keys: int = 0) -> Store:
    """The store at a path; `none` is no store, and None the usual place in the user's folder.

    `limit` is in bytes, and each of the server's `keys` may use an equal part of it.
    """
    if path == "none":
        return Store()
    place = Path(path).expanduser() if path else home() / "responses.sqlite"
    try:
        return Store(place, days, limit, keys)
    except (OSError, sqlite3.Error) as error:
        if path:
            raise SetupError(f"--store {path} cannot be used: {error}.") from error
        log.warning("responses are not stored: %s: %s", place, error)
        return Store()


class Store:
    """Without a path, nothing is stored."""

    def __init__(
        self,
        path: Path | None = None,
        days: int = 30,
        limit: int | None = None,
        keys: int = 0,
    ) -> None:
        self._days = days
        self._pruned = 0.0
        self._on = path is not None
        if path is None:
            return
        self._writer = StoreWriter(path, limit, keys)
        try:
            self._writer.settle(_runs_elsewhere, LOST)
            self._reader = StoreReader(path)
        except BaseException:
            self._writer.close()
            raise
        for _ in self._cleaning():
            pass
        self._writing = _threads("millrace-store-writer")
        self._reading = _threads("millrace-store-reader")

    @property
    def on(self) -> bool:
        return self._on

    def close(self) -> None:
        if self._on:
            for threads in (self._reading, self._writing):
                threads.shutdown(cancel_futures=True)
            self._reader.close()
            self._writer.close()

    def demand(self, param: str) -> None:
        """Raise if nothing is stored here."""
        if not self.on:
            raise BadRequest(
                f"'{param}' needs stored responses, and this server stores none (--store none).",
                param=param,
            )

    async def check_room(self, caller: str, content: Callable[[], int]) -> None:
        """Raise InsufficientStorage if there is no room for what a request will store.

        `content` measures it in bytes, which may take too long for the event loop.
        """

        def check(reader: StoreReader) -> None:
            size, usage = content(), reader.usage(owner(caller))
            self._writer.space.check(StoreUsage(usage.own + size, usage.total + size))
            self._writer.space.check_disk(size)

        await self._read(check)

    async def put(
        self,
        response: dict[str, Any],
        given: list[Item],
        *,
        running: bool = False,
        events: bytes | None = None,
        conversation: str | None = None,
    ) -> None:
        await self._write(
            lambda w: w.put(
                response,
                given,
                runner=os.getpid() if running else None,
                events=events,
                conversation=conversation,
            ),
            items=len(given) + len(response["output"]),
        )
        if time.time() - self._pruned > PRUNE_EVERY:
            # In a context of its own: it is not this caller's work.
            Context().run(self._clean, self._cleaning())

    async def head(self, id: str) -> StoredResponse | None:
        """A response without its output."""
        return await self._read(lambda r: r.head(id))

    async def response(self, id: str) -> dict[str, Any]:
        found = await self._read(lambda r: r.response(id)) if self.on else None
        if found is None:
            raise NotFound(f"There is no response '{id}' here.", param="response_id")
        return found

    async def events(self, id: str) -> bytes | None:
        return await self._read(lambda r: r.events(id))

    async def chain(self, id: str) -> list[Section]:
        """A response and all that it goes back to, oldest first."""
        self.demand("previous_response_id")
        found: list[str] = []
        next: str | None = id
        while next is not None:
            links = await self._read(partial(StoreReader.links, id=next))
            if not links:
                reason = f"'{id}' goes back to it." if found else ""
                raise PreviousResponseNotFound(next, reason)
            found += [link for link, _ in links]
            next = links[-1][1]
        return [Section(link) for link in reversed(found)]

    async def delete(self, id: str) -> bool:
        if not self.on or not await self._write(lambda w: w.delete(id)):
            return False
        await self._swept(id)
        return True

    async def item(self, id: str, caller: str) -> Item:
        self.demand("item_reference")
        found = await self._read(lambda r: r.item(id, owner(caller)))
        if found is None:
            raise NotFound(f"There is no item '{id}' here.", param="input")
        return found

    async def batch(
        self,
        sections: Sections,
        *,
        newest_first: bool,
        most: int,
        after: Cursor | None = None,
        until: Cursor | None = None,
        rules: bool = False,
    ) -> ItemBatch:
        """The next items of a list; see `StoreReader.batch`."""
        return await self._read(
            lambda r: r.batch(
                sections,
                newest_first=newest_first,
                most=most,
                after=after,
                until=until,
                rules=rules,
            ),
            items=most,
        )

    async def find(self, sections: Sections, id: str, newest_first: bool) -> Cursor | None:
        """Where an item is in a list."""
        found, at = None, 0 if newest_first else len(sections) - 1
        while found is None and 0 <= at < len(sections):
            found, at = await self._read(
                partial(
                    StoreReader.find, sections=sections, id=id, begin=at, newest_first=newest_first
                )
            )
        return found

    async def add_conversation(self, conversation: dict[str, Any], items: list[Item]) -> None:
        self.demand("conversation")
        await self._write(lambda w: w.add_conversation(conversation, items), len(items), grows=True)

    async def conversation(self, id: str) -> StoredConversation:
        self.demand("conversation")
        found = await self._read(lambda r: r.conversation(id))
        if found is None:
            raise NotFound(f"There is no conversation '{id}' here.", param="conversation")
        return found

    async def label_conversation(self, id: str, metadata: dict[str, Any]) -> bool:
        return await self._write(lambda w: w.label_conversation(id, metadata))

    async def delete_conversation(self, id: str) -> bool:
        self.demand("conversation")
        if not await self._write(lambda w: w.delete_conversation(id)):
            return False
        await self._swept(id)
        return True

    async def conversation_item(self, id: str, item: str) -> Item:
        found = await self._read(lambda r: r.conversation_item(id, item))
        if found is None:
            raise _no_item(item)
        return found

    async def extend_conversation(self, id: str, items: list[Item]) -> bool:
        return await self._write(lambda w: w.extend_conversation(id, items), len(items), grows=True)

    async def shorten_conversation(self, id: str, item: str) -> None:
        found = False
        while await self._write(lambda w: w.shorten_conversation(id, item), BATCH_ITEMS):
            found = True
        if not found:
            raise _no_item(item)
        while await self._write(StoreWriter.shrink, BATCH_ITEMS):
            pass
        await self._write(StoreWriter.forget)

    async def _swept(self, id: str) -> None:
        """Delete the items of something that was deleted, batch by batch."""
        while await self._write(lambda w: w.sweep(id), BATCH_ITEMS):
            pass
        while await self._write(StoreWriter.shrink, BATCH_ITEMS):
            pass
        await self._write(StoreWriter.forget)

    def _cleaning(self) -> Iterator[None]:
        """Drop what is old, and what is left of what was deleted, in bounded steps."""
        self._pruned = time.time()
        return self._writer.cleaning(self._pruned - self._days * 86400)

    def _clean(self, steps: Iterator[None]) -> None:
        """Take the steps one by one, each as a job of its own."""

        def step() -> None:
            try:
                next(steps)
            except StopIteration:
                return
            except sqlite3.Error as error:
                log.error("old responses were not deleted: %s", error)
                return
            self._clean(steps)

        self._writing.submit_expected(BATCH_ITEMS * _WRITE, step)

    async def _read(self, work: Callable[[StoreReader], T], items: int = 1) -> T:
        return await self._do(self._reading, items * _READ, lambda: work(self._reader))

    async def _write(
        self, work: Callable[[StoreWriter], T], items: int = 1, *, grows: bool = False
    ) -> T:
        """`grows` refuses the work if the disk has too little free space."""

        def write() -> T:
            if grows:
                self._writer.space.check_disk(0)
            return work(self._writer)

        return await self._do(self._writing, items * _WRITE, write)

    async def _do(self, threads: FairExecutor, seconds: float, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(threads.submit_expected(seconds, work))
        except (sqlite3.Error, OSError) as error:
            log.error("the response store failed: %s", error)
            full = isinstance(error, sqlite3.Error) and is_full(error)
            kind = InsufficientStorage if full else StorageUnavailable
            raise kind(f"The response store failed: {error}.") from error


def _threads(name: str) -> FairExecutor:
    return FairExecutor(1, name, waiting_per_caller=_WAITING_PER_CALLER, waiting=_WAITING)


def _no_item(id: str) -> NotFound:
    return NotFound(f"There is no item '{id}' in this conversation.", param="item_id")


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
