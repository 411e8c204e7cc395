"""How many prompt tokens a step takes: one promise, one rule. Pure.

The promise is `max_stall`: while sequences are being answered, no step is planned to take longer. The rule
is a line fitted to the steps of late: seconds = base · steps + a · sequences + b · tokens + c · keys read.
A step takes all sequences that are being answered, then as many prompt tokens as the line allows.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLES = 256
"""Steps that the line is fitted to: some seconds' worth, so that it follows what the device does now."""
REFIT = 16
"""Steps between two fits; a fit takes as long as a thousandth of them on a slow host."""
OUTLIER = 3.0
"""Residuals beyond so many times the median one count as if they were so large: one slow step is noise."""
LEAST = 16
"""Prompt tokens that a step takes however slow the device is: prompts must come to their end."""
GUESSED_TOKEN = 0.001
"""Seconds that a token of a prompt is thought to take as long as nothing has been measured."""
IDLE = 2.0
"""Seconds that other work may take while nobody is being answered: nothing is heard until its end."""
UNKNOWN = 128
"""Prompt tokens of a step beside others as long as nothing has been measured."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step computes, or several whose time was measured as one."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    keys: int = 0
    """Over all tokens, the keys that each attends to."""

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(
            self.steps + other.steps,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.keys + other.keys,
        )


class StepCost:
    """The line: what a step of a size takes, as measured lately."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[int, ...]] = deque(maxlen=SAMPLES)
        self._seconds: deque[float] = deque(maxlen=SAMPLES)
        self._until_fit = 1
        self._rates = (0.0, 0.0, 0.0, 0.0)

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """Seconds for each step, sequence, token and key; never negative."""
        return self._rates

    @property
    def known(self) -> bool:
        return any(self._rates)

    def saw(self, size: StepSize, seconds: float) -> None:
        """A step of this size took so long."""
        self._sizes.append(astuple(size))
        self._seconds.append(seconds)
        self._until_fit -= 1
        if not self._until_fit:
            self._fit()
            self._until_fit = min(REFIT, len(self._sizes))

    def seconds(self, size: StepSize) -> float:
        base, sequence, token, key = self._rates
        return base * size.steps + sequence * size.sequences + token * size.tokens + key * size.keys

    def tokens(self, seconds: float, context: int) -> float:
        """How many tokens of a prompt behind `context` others take this long."""
        _, _, token, key = self._rates
        # seconds = each · n + key / 2 · n²
        each = token + key * (context + 0.5)
        divisor = each + math.sqrt(each * each + 2 * key * seconds)
        return 2 * seconds / divisor if divisor else math.inf

    def _fit(self) -> None:
        sizes = np.array(self._sizes, float)
        seconds = np.array(self._seconds)
        # A step of ten times the time has ten times the error: what is fitted is the share.
        weights = 1 / np.maximum(seconds, 1e-9)
        for _ in range(3):
            rates = _non_negative(sizes * weights[:, None], seconds * weights)
            residuals = np.abs(sizes @ rates - seconds) / np.maximum(seconds, 1e-9)
            # Equal steps differ by a hundredth: such residuals say nothing of outliers.
            bound = OUTLIER * max(float(np.median(residuals)), 0.01)
            share = np.minimum(1.0, bound / np.maximum(residuals, 1e-12))
            weights = np.sqrt(share) / np.maximum(seconds, 1e-9)
        base, sequence, token, key = rates.tolist()
        self._rates = base, sequence, token, key


def _non_negative(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative rates: the best of all choices of rates that are zero.

    There are fifteen, and each is a system of at most four equations. Where none is zero, that is the
    best."""
    scale = np.maximum(np.sqrt((sizes**2).sum(axis=0)), 1e-12)
    scaled = sizes / scale
    square, right = scaled.T @ scaled, scaled.T @ seconds
    # A little of each rate costs something: of two that always grow together, neither runs away.
    square = square + 1e-6 * np.eye(4)
    best, least = np.zeros(4), np.inf
    for count in (4, 3, 2, 1):
        for chosen in itertools.combinations(range(4), count):
            at = list(chosen)
            rates = np.zeros(4)
            rates[at] = np.linalg.solve(square[np.ix_(at, at)], right[at])
            if (rates < 0).any():
                continue
            # The squared error, less what is the same for all choices.
            error = float(rates @ square @ rates - 2 * rates @ right)
            if error < least:
                best, least = rates, error
        if count == 4 and least < np.inf:
            break
    found: NDArray[np.float64] = best / scale
    return found


class Pacing:
    """The promise, kept by the line."""

    def __init__(self, max_stall: float, most: int) -> None:
        """`most` is how many tokens a step may have in all, whatever the promise allows."""
        self.max_stall = max_stall
        self._most = most
        self.cost = StepCost()

    def room(self, planned: StepSize, context: int, left: int) -> int:
        """How many more tokens of a prompt, of which `left` are to be run behind `context` others, may be
        added to a step of which this is planned."""
        most = min(left, self._most - planned.tokens)
        if most <= 0:
            return 0
        if not planned.sequences:
            return most
        if not self.cost.known:
            return min(most, max(0, UNKNOWN - planned.tokens))
        spare = self.max_stall - self.cost.seconds(planned)
        if spare <= 0:
            return 0
        count = int(min(most, self.cost.tokens(spare, context)))
        while count and self.breaks(planned + prompt_size(context, count)):
            count -= 1  # what the root lacks in exactness
        return count

    def breaks(self, planned: StepSize) -> bool:
        """Whether a step of this size would break the promise."""
        return self.cost.seconds(planned) > self.max_stall

    def drafting(self, planned: StepSize, *, prompts: bool) -> float:
        """Seconds that a step of which this is planned may take with draft tokens: where prompts wait, they
        get half of what the promise leaves."""
        if not prompts:
            return self.max_stall
        return (self.cost.seconds(planned) + self.max_stall) / 2

    def spare(self, planned: StepSize) -> float:
        """Seconds that something else may take beside what is planned."""
        if not planned.sequences:
            return IDLE
        return max(0.0, self.max_stall - self.cost.seconds(planned))

    def token_seconds(self, running: int) -> float:
        """What a token of a prompt takes beside this many sequences, whole steps counted in."""
        if not self.cost.known:
            return GUESSED_TOKEN
        step = StepSize(1, running, running, 0)
        count = max(self.room(step, 0, self._most), self.progress(0, self._most))
        return self.cost.seconds(step + prompt_size(0, count)) / count

    def progress(self, taken: int, left: int) -> int:
        """How many tokens the first prompt gets even if there is no room for them."""
        return min(LEAST, left, self._most) if not taken else 0


def prompt_size(context: int, tokens: int) -> StepSize:
    """What so many tokens of a prompt add to a step, behind `context` others."""
    return StepSize(0, 0, tokens, tokens * context + tokens * (tokens + 1) // 2)


def decode_size(lengths: list[int], drafts: int = 0) -> StepSize:
    """A step of sequences of these lengths that are being answered, with so many draft tokens in all."""
    return StepSize(1, len(lengths), len(lengths) + drafts, sum(lengths))
