"""The streams of several prompts as one, where a prompt that is aborted leaves the others alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from millrace.errors import Cancelled
from millrace.serving.model import Running
from millrace.text.deltas import Event

Item = Event | Cancelled
_AHEAD = 64
"""Events that are read ahead of a client."""


class GenerateBatch:
    """Must be closed, as each of its members."""

    def __init__(self, members: Sequence[Running]) -> None:
        self.members = members

    def close(self) -> None:
        for member in self.members:
            member.close()

    async def events(self) -> AsyncIterator[tuple[int, Item]]:
        """Each event with its member's number; a cancellation is the last event of its member."""
        queue: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue(_AHEAD)
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


async def _forward(
    number: int, member: Running, queue: asyncio.Queue[tuple[int, Item | Exception | None]]
) -> None:
    try:
        async for event in member.events():
            await queue.put((number, event))
    except Exception as error:
        await queue.put((number, error))
    await queue.put((number, None))
