"""How long things take here, as measured lately, and what follows for the size of a prefill chunk.

Running streams feel a chunk as a gap between two tokens. The gap is kept under a target: the one
that was asked for, or a multiple of the recent decode step.
"""

from __future__ import annotations

from collections import deque

GAP_IN_STEPS = 2.5
SMALLEST_CHUNK = 16
_WINDOW = 64
_MEMORY = 0.3


class Pace:
    def __init__(self, chunk: int, max_stall: float | None = None) -> None:
        self._chunk = chunk
        self._max_stall = max_stall
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self.token_seconds = 1e-3
        """What one prompt token costs."""

    def saw_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def saw_chunk(self, tokens: int, seconds: float) -> None:
        """A chunk took this long by itself; within `saw_gap` the decode step is taken off."""
        if tokens and seconds > 0:
            cost = seconds / tokens
            self.token_seconds += _MEMORY * (cost - self.token_seconds)

    def saw_gap(self, tokens: int, seconds: float) -> None:
        """A decode step with a chunk beside it took this long together."""
        self.saw_chunk(tokens, max(seconds - self.step, 0.1 * seconds))

    @property
    def step(self) -> float:
        """The recent decode step: the slow end of the last ones, since the batch comes and goes."""
        if not self._steps:
            return 0.0
        ordered = sorted(self._steps)
        return ordered[int(0.9 * (len(ordered) - 1))]

    def limit(self, running: bool) -> int:
        """How many prompt tokens may run before the next decode step."""
        if not running or not self.step:
            return self._chunk
        target = GAP_IN_STEPS * self.step if self._max_stall is None else self._max_stall
        spare = max(0.0, target - self.step)
        return max(SMALLEST_CHUNK, min(self._chunk, int(spare / self.token_seconds)))

    def chunk(self, left: int, running: bool) -> int:
        """How many of a prompt's `left` tokens to run now."""
        # Equal parts: a small remainder at the end would cost a step of its own.
        return -(-left // -(-left // self.limit(running)))
