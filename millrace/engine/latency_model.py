"""How long things take here, as measured lately, and what follows for the size of a prefill chunk.

Running streams feel a chunk as a gap between two tokens. The gap is kept under a target: the one
that was asked for, or what is smooth beside such steps, as long as guesses make them lately. It is also
at least what a step will take, and half as much again, once the prompts that wait have joined: their
rows are about to make every step that long anyway, and getting them in quickly is what a full batch
lives on. While many wait, a gap may be as long as few would mind: small chunks cost everybody more in
the end. Where streams have settled among fewer rows, a gap is no longer than is smooth beside theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from millrace.engine.chunkcost import GUESSED_WORTH, SMALLEST_CHUNK, ChunkCost
from millrace.engine.smoothness import CALM_STEPS, UNSEEN, longest_gap, longest_step, used_to

GAP_IN_STEPS_TO_COME = 1.5
GAP_AMONG_MORE = 1.25
"""Steps that a gap takes at least where rows are more than settled streams are used to."""
GAP_WITH_JOINS = 1.1
"""What a gap may be longer by where rows join: a chunk of its own would be more."""
GAP_UNDER_PRESSURE = 0.12
"""Seconds that a gap may have while many wait."""
_MANY, _MANY_PER_RUNNING = 3, 0.5
"""Rows that are many to wait: so many, and so many for each that runs."""
GROWTH = 2
"""A chunk is at most this many times as large as those before it: what larger ones take is a guess."""
_EMA_WEIGHT = 0.3
_RELIEF, _DOUBT = 0.05, 1.5
"""How fast steps that were slow are forgotten, and what the first of a kind may yet turn out to take."""
_CALM = 1.25
"""How many times as long as usual steps may take in a moment that is not a bad one."""
_SLOW_EMA_WEIGHT = 0.02
_SHRINKING = 0.98
_GUESSED_GROWTH = 0.2
"""How much of a one-row step each further row adds, before it has been measured."""
_APART = 2
"""How many times as many rows tell what a row adds."""
_GUESSED_TOKEN = 1 / 16
"""How much of a step a prompt token takes, before it has been measured."""
GOOD_DEAL = 4
"""How many times what a chunk costs by itself its tokens should cost, where nobody has settled and few
wait."""
_CLEARLY = 1.2
_LESS = 4
"""How many times smaller than is worth it a chunk may be for the sake of settled streams."""
IDLE_SECONDS = 2.0
"""What a chunk may take while nobody waits for tokens: until its end nothing is heard."""


class LatencyModel:
    def __init__(self, chunk: int, max_stall: float | None = None, grain: int = 1) -> None:
        """`grain` is how many tokens cost as much as one of them."""
        self._chunk = chunk
        self._max_stall = max_stall
        self._grain = grain
        self._steps: dict[int, float] = {}
        """The decode step by the number of rows."""
        self._usual: dict[int, float] = {}
        """The same on the whole: a bad second does not change it."""
        self._slow: dict[int, float] = {}
        """The same as it was in the worst of the last moments."""
        self._lateness = self._worst_lateness = 1.0
        """How many times as long as usual steps take, with guesses and without, lately and in the worst
        of the last moments."""
        self._cost = ChunkCost()
        self._extra = 0.0
        """What guesses make the longest steps longer by, lately: gaps that streams have anyway."""
        self._usual_extra = 0.0
        """What they make a step longer by on the whole."""
        self._join: float | None = None
        """What a row that joins adds to a step."""
        self.promised = self.promised_step = math.inf
        """Seconds that a gap, and a step with guesses, may take for the sake of streams that have
        settled."""

    @property
    def token_seconds(self) -> float:
        """What one prompt token adds to a chunk."""
        return self._cost.token

    def saw_step(self, rows: int, seconds: float) -> None:
        before = self._steps.get(rows, seconds)
        # One slow step is noise: a jump counts for no more than a doubling.
        seconds = min(seconds, 2 * before)
        self._steps[rows] = before + _EMA_WEIGHT * (seconds - before)
        slow = self._slow.get(rows, _DOUBT * seconds)
        self._slow[rows] = max(self._steps[rows], slow + _RELIEF * (self._steps[rows] - slow))
        usual = self._usual[rows] = used_to(self._usual.get(rows, seconds), seconds)
        self.saw_lateness(seconds / usual if usual else 1.0)

    def saw_lateness(self, times: float) -> None:
        """A step took so many times as long as those like it do."""
        self._lateness += _EMA_WEIGHT * (min(times, 2 * max(1.0, self._lateness)) - self._lateness)
        relieved = self._worst_lateness + _RELIEF * (self._lateness - self._worst_lateness)
        self._worst_lateness = max(self._lateness, relieved)

    def saw_guesses(self, rows: int, extra: float) -> None:
        """A step of so many rows was longer by this much, since they guessed ahead."""
        self._extra = max(extra, _SHRINKING * self._extra)
        # Nobody gets used to anything in a bad moment.
        if self.calm(rows):
            self._usual_extra += _SLOW_EMA_WEIGHT * (extra - self._usual_extra)

    def saw_join(self, rows: int, joined: int, seconds: float, tokens: int = 0) -> None:
        """A plain step, before which so many rows joined and a chunk ran, took this long together."""
        each = max(0.0, seconds - (self.expected(rows, tokens) or 0.0)) / joined
        before = each if self._join is None else self._join
        # Rows that join a few at a time cost others little, rows that join too many at a time a gap.
        self._join = max(each, before + _EMA_WEIGHT * (each - before))

    def promise(self, company: int | None) -> None:
        """Streams are used to this many rows; None, if there are no such streams."""
        self.promised = self.promised_step = math.inf
        if company is not None and self._steps:
            self.promised = self.smooth(company)
            usual = self._usual_step(company)
            self.promised_step = min(longest_step(usual), CALM_STEPS * (usual + self._usual_extra))

    def smooth(self, company: int) -> float:
        """Seconds that a gap may take beside steps of so many rows."""
        return (
            longest_gap(self._usual_step(company) + self._usual_extra) if self._steps else math.inf
        )

    def _usual_step(self, rows: int) -> float:
        return self._usual.get(rows) or self.step(rows)

    def saw_chunk(self, tokens: int, seconds: float) -> None:
        """A chunk took this long by itself."""
        self._cost.saw(tokens, seconds)

    def saw_gap(self, rows: int, tokens: int, seconds: float, joined: int = 0) -> None:
        """A plain decode step with a chunk beside it, and so many rows that joined, took this long
        together."""
        step = self.step(rows) + joined * (self._join or 0.0)
        chunk = max(0.0, seconds - step)
        if self._cost.known:  # as with steps, one slow chunk is noise
            chunk = min(chunk, 2 * max(step, self._cost.of(tokens)))
        self._cost.saw(tokens, chunk)

    def step(self, rows: int) -> float:
        """The decode step with so many rows, measured or judged from the nearest that was."""
        return _judged(self._steps, rows)

    def slow_step(self, rows: int) -> float:
        """The same, as long as it was in the worst of the last moments."""
        return _judged(self._slow, rows)

    def doubted_step(self, rows: int) -> float:
        """The same, as long as it may turn out where it has not been seen."""
        return self.slow_step(rows) * (1.0 if rows in self._steps else _DOUBT)

    def slowness(self, rows: int) -> float:
        """How many times as long as usual such steps, and any, took in the worst of the last moments."""
        usual = self._usual_step(rows)
        slow = self.slow_step(rows) / usual if usual else 1.0
        return max(1.0, round(slow, 6), round(self._worst_lateness, 6))

    def calm(self, rows: int) -> bool:
        """Whether such steps take no longer than usual."""
        return self.slowness(rows) <= _CALM

    @property
    def most_rows(self) -> int:
        """The most rows whose step has been seen."""
        return max(self._steps, default=0)

    @property
    def worth(self) -> int:
        """How many tokens cost as much as a chunk does by itself, whatever is in it."""
        if not self._cost.known:
            return GUESSED_WORTH
        return max(GUESSED_WORTH, int(self._cost.base / self._cost.token))

    def expected(self, rows: int, tokens: int) -> float | None:
        """Seconds that a step and a chunk should take; None if one of them is not known."""
        if (rows and not self._steps) or (tokens and not self._cost.known):
            return None
        return self.step(rows) * bool(rows) + self._cost.of(tokens) * bool(tokens)

    def spare(self, rows: int) -> float:
        """Seconds by which work beside a step may lengthen it."""
        step = self.step(rows)
        return (self._max_stall or longest_gap(step + self._extra)) - step

    def limit(self, running: int, coming: int = 0) -> int:
        """How many prompt tokens may run before the next decode step of the running rows."""
        if not running or not self._steps:
            if not self._cost.known:
                return self._chunk
            return max(
                min(self._chunk, GUESSED_WORTH), self._cost.within(IDLE_SECONDS, self._chunk)
            )
        step, target = self.step(running), self._max_stall
        if target is None:
            # The prompt at hand is one of those that come: alone, it changes nothing.
            to_come = self.step(running + max(0, coming - 1)) + self._extra
            target = max(longest_gap(step + self._extra), GAP_IN_STEPS_TO_COME * to_come)
            if self._pressed(running, coming):
                target = max(target, GAP_UNDER_PRESSURE)
            target = min(target, max(self.promised, GAP_AMONG_MORE * step) + self._extra)
        spare = target - step - self._extra
        if not self._cost.known:
            # A chunk reads all the weights as a step does, until it is known what it takes.
            tokens = (spare - step) / (_GUESSED_TOKEN * step)
        else:
            tokens = self._cost.within(spare, self._chunk)
            tokens = min(tokens, GROWTH * self._cost.largest)
            # Where even a small chunk takes more than the gap, small ones only make more gaps.
            least = self._cost.least
            if least is not None and least > _CLEARLY * spare and self._cost.sure:
                tokens = max(tokens, min(self._worthwhile(step), GROWTH * self._cost.largest))
            # Where kernels compute whole tiles, a gap that few notice may as well be a good deal.
            if self._grain > 1 and self.promised == math.inf and self._max_stall is None:
                deal: float = GROWTH * self._cost.largest
                if not self._pressed(running, coming):
                    deal = min(deal, GOOD_DEAL * max(self._cost.worth, self._grain))
                unseen = self._cost.within(UNSEEN - step - self._extra, self._chunk)
                tokens = max(tokens, min(deal, unseen))
        return max(SMALLEST_CHUNK, min(self._chunk, int(tokens)))

    @staticmethod
    def _pressed(running: int, coming: int) -> bool:
        """Whether many wait."""
        return coming >= max(_MANY, _MANY_PER_RUNNING * running)

    def _worthwhile(self, step: float) -> float:
        """Tokens of a chunk that is worth what it costs by itself; somewhat fewer, where settled streams
        then feel it just not."""
        worth = self._cost.worth
        if self.promised == math.inf:
            return worth
        fits = self._cost.within(_CLEARLY * self.promised - step, worth)
        return fits if fits >= max(SMALLEST_CHUNK, worth / _LESS) else worth

    def joins(self, running: int, chunk: int = 0) -> float:
        """How many rows may join so many that run before their next step, which feels a chunk of so many
        tokens as well; where it feels none, there is one at least."""
        least = 0 if chunk else 1
        if self._join is None:
            return least
        spare = GAP_WITH_JOINS * self.promised - (self.expected(running, chunk) or 0.0)
        return max(least, spare // self._join) if self._join else math.inf

    def pace(self, running: int, coming: int = 0) -> float:
        """Seconds that a prompt takes for each of its tokens, chunk after chunk, where so many rows have
        their steps between."""
        if not running or not self._steps:
            return self.token_seconds
        size = self.limit(running, coming)
        chunk = self._cost.of(size) if self._cost.known else size * self.token_seconds
        return (self.step(running) + self._extra + chunk) / size

    def chunk(self, left: int, running: int, coming: int = 0) -> int:
        """How many of a prompt's `left` tokens to run now."""
        # Equal parts: a small remainder at the end would cost a step of its own.
        limit = self.limit(running, coming)
        return -(-left // max(1, -(-(left - self._grain // 2) // limit)))


def _judged(steps: Mapping[int, float], rows: int) -> float:
    """The step of so many rows, where those of some numbers of rows are known."""
    if not steps:
        return 0.0
    if rows in steps:
        return steps[rows]
    below = max((n for n in steps if n < rows), default=None)
    above = min((n for n in steps if n > rows), default=None)
    if below is not None and above is not None:
        weight = (rows - below) / (above - below)
        return steps[below] * (1 - weight) + steps[above] * weight
    near = below if above is None else above
    assert near is not None
    share = (1 + _GUESSED_GROWTH * (rows - 1)) / (1 + _GUESSED_GROWTH * (near - 1))
    guess = steps[near] * share
    few = min(steps)
    if rows < near or near < _APART * few:
        return guess
    # Further rows add what those before them have added.
    each = max(0.0, steps[near] - steps[few]) / (near - few)
    return min(guess, steps[near] + each * (rows - near))
