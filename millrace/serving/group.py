"""Several requests answered as one: a list of prompts, whose events come in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from millrace.serving.model import Running, ServedModel
from millrace.serving.request import Request
from millrace.text.deltas import Delta, Event, Idle, PromptScores, Usage

_AHEAD = 64
"""Events that are read ahead of a client; what comes then waits, put together, at its source."""


class Group:
    """Choice k of prompt i is choice i·n + k of the group. Must be closed, like a Running."""

    def __init__(self, model: ServedModel, requests: list[Request]) -> None:
        self._members = model.run_all(requests)

    @property
    def n(self) -> int:
        return sum(m.n for m in self._members)

    def on_end(self, report: Callable[[Usage], None]) -> None:
        """`report` receives once per member what it has cost."""
        for member in self._members:
            member.on_end(report)

    def close(self) -> None:
        for member in self._members:
            member.close()

    async def events(self) -> AsyncIterator[Event]:
        if len(self._members) == 1:
            async for event in self._members[0].events():
                yield event
            return
        queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_AHEAD)
        tasks = [
            asyncio.create_task(_forward(member, i * member.n, queue))
            for i, member in enumerate(self._members)
        ]
        try:
            async for event in _merge(queue, len(tasks)):
                yield event
        finally:
            for task in tasks:
                task.cancel()


async def _forward(
    member: Running, first: int, queue: asyncio.Queue[Event | BaseException | None]
) -> None:
    try:
        async for event in member.events():
            if isinstance(event, Delta):
                event = msgspec.structs.replace(event, choice=first + event.choice)
            elif isinstance(event, PromptScores):
                event = PromptScores(first, event.items)
            await queue.put(event)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def _merge(
    queue: asyncio.Queue[Event | BaseException | None], members: int
) -> AsyncIterator[Event]:
    prompt = completion = cached = written = reasoning = 0
    while members:
        item = await queue.get()
        match item:
            case None:
                members -= 1
            case BaseException():
                raise item
            case Usage():
                prompt += item.prompt
                completion += item.completion
                cached += item.cached
                written += item.written
                reasoning += item.reasoning
            case Delta() | PromptScores() | Idle():
                yield item
    yield Usage(prompt, completion, cached, written, reasoning)
