"""A request whose answer nobody reads: what waits is put together, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from millrace.protocol import Choice, PromptLogprobs, RowTokens, Submit, TokenLogprob
from millrace.serving.arrivals import Arrivals
from millrace.serving.in_flight import MOST_QUEUED, InFlight, Item

STEPS = 5000


def made(choices: int) -> InFlight:
    submit = Submit(1, [1], [Choice(i, 0) for i in range(choices)], STEPS)
    return InFlight("x", submit, lambda _: None, idle=60.0)


def step(choice: int, token: int) -> RowTokens:
    finish = "length" if token == STEPS - 1 else None
    return RowTokens(1, choice, [token], finish, [TokenLogprob(token, -1.0)])


async def items(request: InFlight) -> AsyncIterator[Item]:
    arrivals = Arrivals([request])
    while not request.is_over:
        await arrivals.next()
        for item in request.unread():
            yield item


async def read(request: InFlight) -> list[RowTokens]:
    return [i async for i in items(request) if isinstance(i, RowTokens)]


def test_what_nobody_reads_is_put_together_and_whole() -> None:
    async def scene() -> None:
        request = made(3)
        request.scores(PromptLogprobs(1, []))
        for token in range(STEPS):
            for choice in range(3):
                request.take(step(choice, token))
        assert len(request._queue) <= MOST_QUEUED + 3
        rows = await read(request)
        for choice in range(3):
            own = [row for row in rows if row.choice == choice]
            assert [t for row in own for t in row.tokens] == list(range(STEPS))
            assert [s.token for row in own for s in row.logprobs] == list(range(STEPS))
            assert [row.finish for row in own if row.finish] == ["length"]
            assert own[-1].finish == "length"

    asyncio.run(scene())


def test_one_who_reads_along_gets_every_step_by_itself() -> None:
    async def scene() -> None:
        request = made(1)
        reading = asyncio.create_task(read(request))
        for token in range(STEPS):
            request.take(step(0, token))
            await asyncio.sleep(0)
        rows = await reading
        assert [row.tokens for row in rows] == [[token] for token in range(STEPS)]

    asyncio.run(scene())


def test_one_who_comes_back_goes_on_where_it_stopped() -> None:
    async def scene() -> None:
        request = made(1)
        found: list[int] = []
        unread = items(request)
        for token in range(STEPS):
            request.take(step(0, token))
            if token % 700 == 0:
                item = await anext(unread)
                assert isinstance(item, RowTokens)
                found += item.tokens
        async for item in unread:
            assert isinstance(item, RowTokens)
            found += item.tokens
        assert found == list(range(STEPS))

    asyncio.run(scene())
