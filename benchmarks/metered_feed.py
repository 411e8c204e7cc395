"""`millrace` with a meter at the status feed: `python metered_feed.py serve ...`, then `GET /meter`.

The event loop runs one piece of work after the other, each in a context of its own. What runs in the
contexts of the feed's clock and of those who listen to it is timed, by the processor time of the loop's
thread: making snapshots, encoding them, waking the listeners, and writing to their sockets. Setting up a
listener's request is not, since that is no cost per second.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from millrace.api import server
from millrace.api.admin.feed import Feed
from millrace.cli import main

_OURS = ContextVar("ours", default=False)
_counts = {"seconds": 0.0, "snapshots": 0}


def _meter_loop() -> None:
    plain = asyncio.Handle._run

    def run(handle: Any) -> None:
        if not handle._context.get(_OURS, False):
            plain(handle)
            return
        began = time.thread_time()
        plain(handle)
        _counts["seconds"] += time.thread_time() - began

    asyncio.Handle._run = run


def _mark_feed() -> None:
    start, events, snapshot = Feed.start, Feed.events, Feed._snapshot

    async def marked_start(feed: Feed) -> None:
        token = _OURS.set(True)
        await start(feed)
        _OURS.reset(token)

    async def marked_events(feed: Feed) -> Any:
        _OURS.set(True)
        async for event in events(feed):
            yield event

    def counted_snapshot(feed: Feed, sample: Any) -> bytes:
        _counts["snapshots"] += 1
        return snapshot(feed, sample)

    Feed.start, Feed.events, Feed._snapshot = marked_start, marked_events, counted_snapshot


def _add_route() -> None:
    plain = server.create_app

    async def meter(http: Request) -> JSONResponse:
        return JSONResponse(_counts)

    def create_app(context: Any) -> Any:
        app = plain(context)
        app.router.routes.insert(0, Route("/meter", meter))
        return app

    server.create_app = create_app


if __name__ == "__main__":
    _meter_loop()
    _mark_feed()
    _add_route()
    main()
