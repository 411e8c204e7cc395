"""Tracing a fault to the row that causes it. Pure.

When a step of several rows fails, nobody knows whose fault it is. The rows are held apart in halves, and
the halves run one after the other until each has made a few steps; a half that fails again is halved
again. A row that fails by itself is the one.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.books import NO_GROUP, Seat

STEPS_TO_CLEAR = 2
"""Steps without a fault after which a group is trusted."""


class Quarantine:
    def __init__(self) -> None:
        self._next = NO_GROUP + 1
        self._steps = 0

    def fault(self, seats: Sequence[Seat]) -> list[Seat]:
        """A step of these rows has failed; returns the rows that are to blame."""
        self._steps = 0
        if len(seats) == 1:
            return list(seats)
        half = len(seats) // 2
        for part in (seats[:half], seats[half:]):
            for seat in part:
                seat.group = self._next
            self._next += 1
        return []

    def stepped(self, running: Sequence[Seat]) -> None:
        """A step of these rows has gone well."""
        if running and running[0].group != NO_GROUP:
            self._steps += 1
            if self._steps >= STEPS_TO_CLEAR:
                for seat in running:
                    seat.group = NO_GROUP
                self._steps = 0

    def apart(self, running: Sequence[Seat], queued: Sequence[int]) -> bool:
        """Whether those that run must make way, so that a group that is held apart can run.

        `queued` are the groups of those that wait.
        """
        if not running or running[0].group != NO_GROUP:
            return False
        return any(group != NO_GROUP for group in queued)
