"""Tracing a fault to the row that causes it. Pure.

When a step of several rows fails, nobody knows whose fault it is. The rows are held apart in halves, and
the halves run one after the other until each has made a few steps; a half that fails again is halved
again. A row that fails by itself is the one.
"""

from __future__ import annotations

from collections import abc

from millrace.engine.sequences import NO_GROUP, Sequence

STEPS_TO_CLEAR = 2
"""Steps without a fault after which a group is trusted."""


class Quarantine:
    def __init__(self) -> None:
        self._next = NO_GROUP + 1
        self._steps = 0

    def fault(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """A step of these rows has failed; returns the rows that are to blame."""
        self._steps = 0
        if len(sequences) == 1:
            return list(sequences)
        half = len(sequences) // 2
        for part in (sequences[:half], sequences[half:]):
            for sequence in part:
                sequence.group = self._next
            self._next += 1
        return []

    def stepped(self, running: abc.Sequence[Sequence]) -> None:
        """A step of these rows has gone well."""
        if running and running[0].group != NO_GROUP:
            self._steps += 1
            if self._steps >= STEPS_TO_CLEAR:
                for sequence in running:
                    sequence.group = NO_GROUP
                self._steps = 0

    def apart(self, running: abc.Sequence[Sequence], queued: abc.Sequence[int]) -> bool:
        """Whether those that run must make way, so that a group that is held apart can run.

        `queued` are the groups of those that wait.
        """
        if not running or running[0].group != NO_GROUP:
            return False
        return any(group != NO_GROUP for group in queued)
