"""How long things take here, as measured lately, and what follows for the size of a prefill chunk.

Running streams feel a chunk as a gap between two tokens. The gap is kept under a target: the one
that was asked for, or a multiple of the decode step. That step is the one of the batch as it will
be once the prompts that wait have joined: their rows are about to make every step that long anyway,
and getting them in quickly is what a full batch lives on.
"""

from __future__ import annotations

GAP_IN_STEPS = 2.5
SMALLEST_CHUNK = 4
LONG_CHUNK = 64
"""Chunks from which the cost of a token is learnt; what shorter ones take beyond it is their own."""
_MEMORY = 0.3
_GUESSED_GROWTH = 0.2
"""How much of a one-row step each further row adds, before it has been measured."""


class Pace:
    def __init__(self, chunk: int, max_stall: float | None = None) -> None:
        self._chunk = chunk
        self._max_stall = max_stall
        self._steps: dict[int, float] = {}
        """The decode step by the number of rows."""
        self.token_seconds = 1e-3
        """What one prompt token costs in a long chunk."""
        self._measured = False
        self._extra = 0.0
        """What guesses make a step longer by, lately."""
        self._chunk_seconds: float | None = None
        """What a chunk costs beside its tokens: reading the weights, a long context behind it."""

    def saw_step(self, rows: int, seconds: float) -> None:
        before = self._steps.get(rows, seconds)
        # One slow step is noise: a jump counts for no more than a doubling.
        self._steps[rows] = before + _MEMORY * (min(seconds, 2 * before) - before)

    def saw_guesses(self, extra: float) -> None:
        """A step was longer by this much, since rows guessed ahead; streams feel that step."""
        self._extra += _MEMORY * (extra - self._extra)

    def saw_chunk(self, tokens: int, seconds: float) -> None:
        """A chunk took this long by itself."""
        if tokens >= LONG_CHUNK:
            weight = _MEMORY if self._measured else 1.0
            self.token_seconds += weight * (seconds / tokens - self.token_seconds)
            self._measured = True

    def saw_gap(self, rows: int, tokens: int, seconds: float) -> None:
        """A plain decode step with a chunk beside it took this long together."""
        chunk = max(0.0, seconds - self.step(rows))
        beside = max(0.0, chunk - tokens * self.token_seconds)
        before = beside if self._chunk_seconds is None else self._chunk_seconds
        self._chunk_seconds = before + _MEMORY * (beside - before)

    def step(self, rows: int) -> float:
        """The decode step with so many rows, measured or judged from the nearest that was."""
        if not self._steps:
            return 0.0
        if rows in self._steps:
            return self._steps[rows]
        below = max((n for n in self._steps if n < rows), default=None)
        above = min((n for n in self._steps if n > rows), default=None)
        if below is None or above is None:
            near = below if above is None else above
            assert near is not None
            share = (1 + _GUESSED_GROWTH * (rows - 1)) / (1 + _GUESSED_GROWTH * (near - 1))
            return self._steps[near] * share
        weight = (rows - below) / (above - below)
        return self._steps[below] * (1 - weight) + self._steps[above] * weight

    def limit(self, running: int, coming: int = 0) -> int:
        """How many prompt tokens may run before the next decode step of the running rows."""
        if not running or not self._steps:
            return self._chunk
        step, target = self.step(running), self._max_stall
        if target is None:
            # The prompt at hand is one of those that come: alone, it changes nothing.
            target = GAP_IN_STEPS * (self.step(running + max(0, coming - 1)) + self._extra)
        # A chunk reads all the weights as a step does, until it is known what it takes.
        beside = step if self._chunk_seconds is None else self._chunk_seconds
        spare = target - step - self._extra - beside
        return max(SMALLEST_CHUNK, min(self._chunk, int(spare / self.token_seconds)))

    def chunk(self, left: int, running: int, coming: int = 0) -> int:
        """How many of a prompt's `left` tokens to run now."""
        # Equal parts: a small remainder at the end would cost a step of its own.
        return -(-left // -(-left // self.limit(running, coming)))
