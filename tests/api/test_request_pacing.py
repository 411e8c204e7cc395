"""Requests that come at once go in one after the other, and what else there is to do is done between."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from millrace.api.request_pacing import RequestPacingMiddleware


class _App:
    """Notes who came in which round of the loop."""

    def __init__(self) -> None:
        self.round = 0
        self.came: list[tuple[Any, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.append((scope["who"], self.round))

    async def count(self) -> None:
        while True:
            self.round += 1
            await asyncio.sleep(0)


async def _nothing(*_: Any) -> Any:
    raise AssertionError


def _go(
    pacing: RequestPacingMiddleware, who: int, type: str = "http", method: str = "POST"
) -> asyncio.Task[None]:
    scope = {"type": type, "who": who, "method": method}
    return asyncio.ensure_future(pacing(scope, _nothing, _nothing))


async def _crowd() -> None:
    app = _App()
    pacing = RequestPacingMiddleware(app)
    counting = asyncio.ensure_future(app.count())
    tasks = [_go(pacing, who) for who in range(50)]
    await asyncio.gather(*tasks)
    counting.cancel()
    assert [who for who, _ in app.came] == list(range(50)), "in the order in which they came"
    rounds = [n for _, n in app.came]
    assert len(set(rounds)) == 50, "others had their turn after each"


def test_a_crowd_goes_in_one_by_one() -> None:
    asyncio.run(_crowd())


async def _one_by_one() -> None:
    app = _App()
    pacing = RequestPacingMiddleware(app)
    for who in range(3):
        begun = app.round
        counting = asyncio.ensure_future(app.count())
        await _go(pacing, who)
        counting.cancel()
        await asyncio.sleep(0.001)
        assert app.round - begun <= 2, "nobody waits who comes alone"
    assert len(app.came) == 3


def test_who_comes_alone_does_not_wait() -> None:
    asyncio.run(_one_by_one())


async def _leavers() -> None:
    app = _App()
    pacing = RequestPacingMiddleware(app)
    tasks = [_go(pacing, who) for who in range(10)]
    await asyncio.sleep(0)
    for task in tasks[3:8]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [who for who, _ in app.came] == [0, 1, 2, 8, 9]
    await _go(pacing, 10)
    assert app.came[-1][0] == 10, "it still turns"


def test_who_leaves_the_queue_holds_nobody_up() -> None:
    asyncio.run(_leavers())


async def _busy() -> None:
    class Work(_App):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            until = time.thread_time() + 0.004
            while time.thread_time() < until:
                pass
            await super().__call__(scope, receive, send)

    worked, begun = time.thread_time(), time.perf_counter()
    pacing = RequestPacingMiddleware(Work(), share=0.5)
    await asyncio.gather(*(_go(pacing, who) for who in range(12)))
    took = time.perf_counter() - begun
    # The last has gone in, and nobody waits for what it works.
    assert took >= (time.thread_time() - worked - 0.004) / 0.5 * 0.9, "half the time is others'"


def test_a_crowd_leaves_a_core_to_others() -> None:
    asyncio.run(_busy())


async def _others() -> None:
    app = _App()
    pacing = RequestPacingMiddleware(app)
    await asyncio.gather(*(_go(pacing, who, type="lifespan") for who in range(5)))
    assert len({n for _, n in app.came}) == 1


def test_only_requests_queue() -> None:
    asyncio.run(_others())


async def _exodus() -> None:
    """All leave while others queue at the entry."""
    app = _App()
    left: list[tuple[int, int]] = []
    gone = asyncio.Event()

    async def stay(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        assert (await receive())["type"] == "http.request", "what they send is not held up"
        assert (await receive())["type"] == "http.disconnect"
        left.append((scope["who"], app.round))

    pacing = RequestPacingMiddleware(stay, share=1.0)
    inside = 40

    def client(who: int) -> asyncio.Task[None]:
        sent = False

        async def receive() -> Any:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request"}
            await gone.wait()
            return {"type": "http.disconnect"}

        return asyncio.ensure_future(
            pacing({"type": "http", "who": who, "method": "POST"}, receive, _nothing)
        )

    counting = asyncio.ensure_future(app.count())
    first = [client(who) for who in range(inside)]
    while len(app.came) < inside:
        await asyncio.sleep(0)
    later = [client(who) for who in range(inside, 5 * inside)]
    gone.set()
    begun = app.round
    await asyncio.gather(*first)
    counting.cancel()
    rounds = [n for who, n in left if who < inside]
    assert len(set(rounds)) == inside, "one in a round"
    # Some of those who come meanwhile leave between them, and none waits for all who come.
    assert rounds[-1] - begun < 3 * inside
    for task in later:
        task.cancel()
    await asyncio.gather(*later, return_exceptions=True)


def test_a_crowd_leaves_one_by_one_and_does_not_queue_behind_those_who_come() -> None:
    asyncio.run(_exodus())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_only_looks_does_not_queue_behind_a_crowd(method: str) -> None:
    async def look() -> None:
        app = _App()
        pacing = RequestPacingMiddleware(app, share=0.01)  # who comes with the crowd waits for long
        crowd = [_go(pacing, who) for who in range(50)]
        looks = [_go(pacing, who, method=method) for who in range(50, 60)]
        counting = asyncio.ensure_future(app.count())
        await asyncio.gather(*looks)
        counting.cancel()
        assert len(app.came) < 20
        assert len({n for who, n in app.came if who >= 50}) >= 9, "one by one all the same"
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(look())
