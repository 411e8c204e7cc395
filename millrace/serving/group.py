"""Several requests answered as one: the one place where streams of events come together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from millrace.errors import Cancelled
from millrace.serving.model import Running
from millrace.text.deltas import Delta, Event, PromptScores, Usage

_AHEAD = 64
"""Events that are read ahead of a client; what comes then waits, put together, at its source."""
_Queue = asyncio.Queue[tuple[int, Event | Exception | None]]


class Group:
    """Must be closed, like each of its members."""

    def __init__(self, members: Sequence[Running]) -> None:
        self.members = members

    @property
    def n(self) -> int:
        return sum(m.n for m in self.members)

    def close(self) -> None:
        for member in self.members:
            member.close()

    async def events(self) -> AsyncIterator[Event]:
        """As of one request: choice k of member i is choice i·n + k, and the costs add up."""
        cost = Usage(0, 0)
        firsts = [sum(m.n for m in self.members[:i]) for i in range(len(self.members))]
        async for number, event in self.numbered():
            match event:
                case Delta(choice=choice):
                    yield msgspec.structs.replace(event, choice=firsts[number] + choice)
                case PromptScores(items=items):
                    yield PromptScores(firsts[number], items)
                case Usage():
                    both = zip(
                        msgspec.structs.astuple(cost), msgspec.structs.astuple(event), strict=True
                    )
                    cost = Usage(*(a + b for a, b in both))
                case Cancelled():
                    raise event
                case _:
                    yield event
        yield cost

    async def numbered(self) -> AsyncIterator[tuple[int, Event | Cancelled]]:
        """Each event with its member's number; a cancellation is the last event of its member."""
        if len(self.members) == 1:
            try:
                async for event in self.members[0].events():
                    yield 0, event
            except Cancelled as cancelled:
                yield 0, cancelled
            return
        queue: _Queue = asyncio.Queue(_AHEAD)
        tasks = [asyncio.create_task(_forward(i, m, queue)) for i, m in enumerate(self.members)]
        left = len(tasks)
        try:
            while left:
                number, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Cancelled) or not isinstance(item, Exception):
                    yield number, item
                else:
                    raise item
        finally:
            for task in tasks:
                task.cancel()


async def _forward(number: int, member: Running, queue: _Queue) -> None:
    try:
        async for event in member.events():
            await queue.put((number, event))
    except Exception as error:
        await queue.put((number, error))
    await queue.put((number, None))
