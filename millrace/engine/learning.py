"""What the times of turns teach: how long steps and chunks take, and what guesses cost. Pure.

A gap between two reads holds a decode step and the chunk that ran beside it. Which chunk that was
depends on how far the device lags behind the host, and what each of the two took is a guess, unless the
chunk was timed by itself. What was run for the first time teaches nothing, since it may have been
compiled or planned.
"""

from __future__ import annotations

from collections import deque

from millrace.engine.latency_model import LatencyModel
from millrace.engine.speculation import Speculation
from millrace.engine.turn import Outcome


class Learning:
    def __init__(
        self, latency: LatencyModel, speculation: Speculation | None, *, pipelined: bool
    ) -> None:
        self._latency = latency
        self._speculation = speculation
        # The last chunk runs after what was read. Where the device is not waited for, the one
        # before may run before or after it.
        self._beside = slice(0, 2) if pipelined else slice(1, 2)
        self._chunks: deque[int] = deque([0, 0, 0], maxlen=3)
        """Prompt tokens launched in the last turns."""
        self._novel: deque[bool] = deque([False] * 3, maxlen=3)
        """Whether they had a shape that had not been run before."""
        self._shapes: set[tuple[int, ...]] = set()
        self._step = 0
        """Tokens of the last step, guesses included."""
        self._timed = False
        """Whether the chunk of the turn before was timed by itself."""
        self._joined = 0
        """Rows that were copied into the batch before the last step."""

    def step(self, rows: int, ahead: int) -> None:
        """A step of so many rows was decided, each with up to so many guesses."""
        self._step = rows * (1 + ahead)

    def joined(self, rows: int) -> None:
        """So many rows joined: what the step takes with that is not what such steps take."""
        self._joined = rows

    def chunk(self, tokens: int, shape: tuple[int, ...] | None) -> None:
        """A chunk was decided, or none of no tokens; a shape, where new ones cost something."""
        self._chunks.append(tokens)
        self._novel.append(shape is not None and shape not in self._shapes)
        if shape is not None:
            self._shapes.add(shape)

    def spare(self, rows: int) -> float:
        """Seconds that may pass between two steps of so many rows beside what a step takes."""
        return self._latency.spare(rows)

    def step_seconds(self, rows: int) -> float:
        """What a step of so many rows should take; 0 without any."""
        return self._latency.step(rows) if rows else 0.0

    def other(self) -> None:
        """Something else ran in place of a chunk: what that takes says nothing of chunks."""
        self._chunks.append(0)
        self._novel.append(True)

    def expected(self, rows: int) -> float | None:
        """Seconds that the turn that was decided should take; None if that is not known."""
        return None if self._novel[-1] else self._latency.expected(rows, self._chunks[-1])

    def learn(self, outcome: Outcome) -> None:
        timed, self._timed = self._timed, outcome.chunk_seconds is not None
        joined, self._joined = self._joined, 0
        if outcome.chunk_seconds is not None and self._chunks[-1] and not self._novel[-1]:
            self._latency.saw_chunk(self._chunks[-1], outcome.chunk_seconds)
        if outcome.gap is None or any(list(self._novel)[self._beside]):
            return
        rows = len(outcome.rows)
        extra = 0.0
        if self._speculation is not None:
            extra = self._speculation.extra(self._step, rows)
            self._latency.saw_guesses(rows, extra)
        gap, tokens = outcome.gap - extra, max(list(self._chunks)[self._beside])
        if tokens and not timed:
            self._latency.saw_gap(rows, tokens, gap, joined)
        elif joined:
            self._latency.saw_join(rows, joined, gap, tokens)
        elif tokens:
            return
        elif self._speculation is not None and self._step > rows:
            slowness = self._latency.slowness(rows)
            late = self._speculation.saw_step(self._step, outcome.gap, slowness)
            if outcome.gap < self._latency.step(rows):
                # Without guesses it would have taken no longer.
                self._latency.saw_step(rows, outcome.gap)
            else:
                self._latency.saw_lateness(late)
        else:
            self._latency.saw_step(rows, outcome.gap)
            if self._speculation is not None and self._latency.calm(rows):
                self._speculation.saw_calm()
