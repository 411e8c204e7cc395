"""Guessing tokens ahead from what the context repeats, and how many of them are worth a try.

Text that quotes, edits or repeats itself goes on as it did before. A guess is a continuation of the
same last tokens further up; the step then runs the guesses beside the row's last token, and draws at
every place as it always would. Guesses that the draws confirm are tokens gained, and the answer is the
one it would have been without. Pure: knows tokens, times and no model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from millrace.engine.smoothness import longest_step, used_to

LONGEST = 4
"""How many last tokens, at most, are looked for: the longest run that stood before is the best guide."""
_TOKEN_BITS = 24
HOPED = 0.04
"""What a guessed token is thought to add to a step until it has been seen, in plain steps."""
HOPEFUL = {4: 0.8, 3: 0.7, 2: 0.5, 1: 0.3}
"""How often guesses hold, by the run that led to them, before any have been seen."""
_EMA_WEIGHT = 0.2
_FORGIVING = 0.01
"""How fast a row that guesses badly is trusted again."""
_FORGETTING, _SURE_AFTER = 0.02, 3
"""How fast steps that were slow in a bad moment are thought to be as fast as usual, and after how many of a
kind it is known what they take."""


class Guess(NamedTuple):
    tokens: list[int]
    run: int
    """How many tokens before it were found further up."""


NO_GUESS = Guess([], 0)


class Lookup:
    """Where runs of tokens stood last in a growing text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[int, int] = {}
        """The place after each run of tokens, when it stood there last. A run is one number, which takes
        half of what a tuple does: a long prompt has four for each of its tokens."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take more text. The end itself is not entered yet: it must be found further up."""
        text, last = self._tokens, self._last
        begin = len(text)
        text.extend(tokens)
        for end in range(max(1, begin), len(text)):
            run = 0
            for at in range(end - 1, max(-1, end - 1 - LONGEST), -1):
                run = run << _TOKEN_BITS | text[at] + 1
                last[run] = end

    def guess(self, count: int) -> Guess:
        """Up to `count` tokens that followed the last ones before."""
        found, length, run = None, 0, 0
        for n, token in enumerate(reversed(self._tokens[-LONGEST:]), 1):
            run = run << _TOKEN_BITS | token + 1
            if (at := self._last.get(run)) is None:
                break  # no longer run did stand there either
            found, length = at, n
        return NO_GUESS if found is None else Guess(self._going_on(found, count), length)

    def _going_on(self, at: int, count: int) -> list[int]:
        """What stands from `at` on; past the end, what has just been guessed is gone on with."""
        text = self._tokens
        guessed: list[int] = []
        for i in range(at, at + count):
            guessed.append(text[i] if i < len(text) else guessed[i - len(text)])
        return guessed


class Guesser:
    """One row's guesses and how they fared."""

    def __init__(self, shares: Mapping[int, float]) -> None:
        self.lookup = Lookup()
        self.shares = dict(shares)
        """How often a guess has been right lately, by the run that led to it."""
        self.guess = NO_GUESS

    @property
    def share(self) -> float:
        return self.shares[self.guess.run]

    def confirmed(self, guessed: int, right: int) -> None:
        self.shares[self.guess.run] = _learned(self.share, guessed, right, _EMA_WEIGHT)

    def untried(self) -> None:
        run = self.guess.run
        self.shares[run] += _FORGIVING * (HOPEFUL[run] - self.shares[run])


def _learned(share: float, guessed: int, right: int, memory: float) -> float:
    share = 1 - (1 - share) * (1 - memory) ** right
    # The first wrong guess says nothing of those behind it.
    return share * (1 - memory) if right < guessed else share


class Guessing(Protocol):
    """A row of the batch, as far as guessing goes."""

    guesser: Guesser | None

    @property
    def guessable(self) -> bool: ...

    @property
    def left(self) -> int:
        """Tokens that it may still make."""

    def context(self, start: int) -> list[int]:
        """Its tokens from `start` on, prompt and generated."""


class Steps(Protocol):
    promised: float
    """Seconds that a gap may take for the sake of streams that have settled."""
    promised_step: float
    """Seconds that a step with guesses may take for their sake, when all is quiet."""

    def step(self, rows: int) -> float:
        """How long a plain step with so many rows takes."""

    def slowness(self, rows: int) -> float:
        """How many times as long as usual steps took in the worst of the last moments."""


class Speculation:
    """How many tokens ahead a batch guesses."""

    def __init__(self, most: int, steps: Steps) -> None:
        self._most = most
        self._steps = steps
        self._shares = dict(HOPEFUL)
        """Of all rows lately; where a new row begins."""
        self._seconds: dict[int, float] = {}
        """What steps with so many tokens took, guesses included."""
        self._usual: dict[int, float] = {}
        """The same on the whole: a bad moment does not change it."""
        self._seen = Counter[int]()
        """How often there was such a step."""

    def propose(self, rows: Sequence[Guessing]) -> list[list[int]]:
        """What to try for each row in the next step; nothing at all if it is not worth it."""
        guessing = [self._guess(row) for row in rows]
        shares = [(g.share, len(g.guess.tokens)) for g in guessing if g is not None]
        width = self.width(shares, len(rows))
        if not width:
            for guesser in guessing:
                if guesser is not None:
                    guesser.untried()
            return []
        return [g.guess.tokens[:width] if g else [] for g in guessing]

    def _guess(self, row: Guessing) -> Guesser | None:
        """Let a row guess; None if it has nothing to guess."""
        if not row.guessable or row.left < 2:
            return None
        if row.guesser is None:
            row.guesser = Guesser(self._shares)
        guesser = row.guesser
        guesser.lookup.extend(row.context(len(guesser.lookup)))
        guesser.guess = guesser.lookup.guess(min(self._most, row.left - 1))
        return guesser if guesser.guess.tokens else None

    def confirmed(self, row: Guessing, guessed: int, right: int) -> None:
        if guessed and row.guesser is not None:
            run = row.guesser.guess.run
            self._shares[run] = _learned(self._shares[run], guessed, right, _EMA_WEIGHT / 10)
            row.guesser.confirmed(guessed, right)

    def saw_step(self, tokens: int, seconds: float, slowness: float = 1.0) -> float:
        """A step of so many tokens took this long, where all take so many times as long as usual; returns
        how many times as long as usual that was."""
        before = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = before + _EMA_WEIGHT * (min(seconds, 2 * before) - before)
        self._seen[tokens] += 1
        usual = self._usual.get(tokens, seconds / slowness)
        sure = self._seen[tokens] > _SURE_AFTER
        usual = self._usual[tokens] = used_to(usual, seconds) if sure else min(usual, seconds)
        return seconds / usual if usual else 1.0

    def saw_calm(self) -> None:
        """A step without guesses took no longer than usual: neither would those with guesses that took long
        when all did, and those that were seen only once or twice are tried again before long."""
        for tokens, seconds in self._seconds.items():
            sure = self._seen[tokens] >= _SURE_AFTER
            soon = min(seconds, self._usual[tokens]) if sure else 0.0
            self._seconds[tokens] = seconds + _FORGETTING * (soon - seconds)

    def extra(self, tokens: int, rows: int) -> float:
        """What guesses make a step longer by, when it has so many tokens in all."""
        if tokens <= rows:
            return 0.0
        return max(0.0, self._cost(tokens, rows) - self._steps.step(rows))

    def width(self, shares: Sequence[tuple[float, int]], rows: int) -> int:
        """How many guesses per row are worth it, given each guessing row's share and its guesses."""
        plain = self._cost(rows, rows)
        if not plain:
            return 0
        best, best_rate = 0, rows / plain
        longest = min(longest_step(plain), self._steps.promised_step)
        slowness = self._steps.slowness(rows)
        # What has not been seen is hoped to cost little: who has settled is shown little of it at a time.
        settled = self._steps.promised < math.inf
        most = max((rows, *self._seconds)) + rows if settled else math.inf
        gained = 0.0
        for width in range(1, min(self._most, max((n for _, n in shares), default=0)) + 1):
            gained += sum(share**width for share, n in shares if n >= width)
            tokens = rows * (1 + width)
            cost = self._cost(tokens, rows)
            if tokens > most or cost > longest or cost * slowness > self._steps.promised:
                break
            rate = (rows + gained) / cost
            # A little more must be in it than nothing: a wrong guess also costs the others.
            if rate > 1.03 * best_rate:
                best, best_rate = width, rate
        return best

    def _cost(self, tokens: int, rows: int) -> float:
        """A step with so many tokens: as seen, or judged from the nearest that were."""
        plain = self._steps.step(rows)
        if tokens == rows:
            return plain
        if tokens in self._seconds:
            return self._seconds[tokens]
        seen = {n: t for n, t in self._seconds.items() if n > rows} | {rows: plain}
        below = max(n for n in seen if n < tokens)
        above = min((n for n in seen if n > tokens), default=None)
        if above is None:
            return seen[below] + (tokens - below) * HOPED * plain
        weight = (tokens - below) / (above - below)
        return seen[below] * (1 - weight) + seen[above] * weight
