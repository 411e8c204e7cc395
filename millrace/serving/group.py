"""Several requests answered as one: the one place where streams of events come together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate

import msgspec

from millrace.errors import Cancelled
from millrace.serving.arrivals import Arrivals
from millrace.serving.running import Running
from millrace.serving.slices import SlicePace, in_slices
from millrace.text.deltas import Delta, Event, Idle, PromptScores, Usage


class Group:
    """Must be closed, like each of its members."""

    def __init__(self, members: Sequence[Running]) -> None:
        self.members = members
        self.firsts = firsts([m.n for m in members])
        """The number that each member's first choice has among all choices."""

    @property
    def n(self) -> int:
        return sum(m.n for m in self.members)

    def usage_of(self, choice: int) -> Usage:
        """The usage so far of the prompt that this choice answers."""
        return self.members[bisect_right(self.firsts, choice) - 1].usage

    def close(self) -> None:
        # Backwards: the last ones, which may not have been given to the engine, would take free places.
        in_slices(reversed(self.members), Running.close)

    async def events(self) -> AsyncIterator[Event]:
        """As of one request: choice k of member i is choice i·n + k, and the costs add up."""
        cost = Usage(0, 0)
        async for number, event in self.numbered():
            match event:
                case Delta(choice=choice):
                    yield msgspec.structs.replace(event, choice=self.firsts[number] + choice)
                case PromptScores(items=items):
                    yield PromptScores(self.firsts[number], items)
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
        arrivals = Arrivals([m.source for m in self.members])
        left = set(range(len(self.members)))
        pace = SlicePace()
        while left:
            number = await arrivals.next()
            if number is None:
                yield 0, Idle()
                continue
            member = self.members[number]
            try:
                for event in member.unread():
                    yield number, event
            except Cancelled as cancelled:
                left.discard(number)
                yield number, cancelled
            if member.is_over:
                left.discard(number)
            await pace.rest()


def firsts(counts: Sequence[int]) -> list[int]:
    """Where each part begins in a list of all parts' entries."""
    return [0, *accumulate(counts)][: len(counts)]
