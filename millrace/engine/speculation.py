"""Draft tokens from what the context repeats, and how many of them are worth running.

Text that quotes, edits or repeats itself goes on as it did before. A draft is a continuation of the same
last tokens further up; the step then runs it behind the row's last token, and draws at every place as it
always would. Draft tokens that the draws confirm are tokens gained, and the answer is the one it would have
been without. Pure: knows tokens, costs and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from millrace.engine.pacing import Pacing, StepSize

LONGEST = 4
"""How many last tokens, at most, are looked for: the longest run that stood before is the best guide."""
_TOKEN_BITS = 24
PRIOR = {4: 0.8, 3: 0.7, 2: 0.5, 1: 0.3}
"""The share of draft tokens that hold, by the run that led to them, before any have been seen."""
_EMA_WEIGHT = 0.2
_RECOVERY = 0.01
"""How fast a row whose draft tokens were wrong is trusted again."""


class Draft(NamedTuple):
    tokens: list[int]
    run: int
    """How many tokens before it were found further up."""


NO_DRAFT = Draft([], 0)


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

    def draft(self, count: int) -> Draft:
        """Up to `count` tokens that followed the last ones before."""
        found, length, run = None, 0, 0
        for n, token in enumerate(reversed(self._tokens[-LONGEST:]), 1):
            run = run << _TOKEN_BITS | token + 1
            if (at := self._last.get(run)) is None:
                break  # no longer run did stand there either
            found, length = at, n
        return NO_DRAFT if found is None else Draft(self._continued(found, count), length)

    def _continued(self, at: int, count: int) -> list[int]:
        """What stands from `at` on; past the end, what has just been drafted is gone on with."""
        text = self._tokens
        drafted: list[int] = []
        for i in range(at, at + count):
            drafted.append(text[i] if i < len(text) else drafted[i - len(text)])
        return drafted


class Drafter:
    """One row's drafts and how they fared."""

    def __init__(self, shares: Mapping[int, float]) -> None:
        self.lookup = Lookup()
        self.shares = dict(shares)
        """The share of draft tokens that held lately, by the run that led to them."""
        self.draft = NO_DRAFT

    @property
    def share(self) -> float:
        return self.shares[self.draft.run]

    def confirmed(self, drafted: int, right: int) -> None:
        self.shares[self.draft.run] = _learned(self.share, drafted, right, _EMA_WEIGHT)

    def untried(self) -> None:
        run = self.draft.run
        self.shares[run] += _RECOVERY * (PRIOR[run] - self.shares[run])


def _learned(share: float, drafted: int, right: int, weight: float) -> float:
    share = 1 - (1 - share) * (1 - weight) ** right
    # The first wrong token says nothing of those behind it.
    return share * (1 - weight) if right < drafted else share


class Draftable(Protocol):
    """A row of the batch, as far as drafts go."""

    drafter: Drafter | None

    @property
    def draftable(self) -> bool: ...

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""

    @property
    def length(self) -> int:
        """Tokens of context."""

    def context(self, start: int) -> list[int]:
        """Its tokens from `start` on, prompt and generated."""


class Speculation:
    """How many draft tokens each row of a step gets."""

    def __init__(self, most: int, pacing: Pacing) -> None:
        self._most = most
        self._pacing = pacing
        self._shares = dict(PRIOR)
        """Of all rows lately; where a new row begins."""

    def propose(
        self, rows: Sequence[Draftable], planned: StepSize, *, prompts: bool = False
    ) -> list[list[int]]:
        """What to try for each row in the step that is planned; `prompts` says that some wait for room."""
        drafters = [self._draft(row) for row in rows]
        most = self._pacing.drafting(planned, prompts=prompts)
        counts = self._counts(rows, drafters, planned, most)
        for drafter, count in zip(drafters, counts, strict=True):
            if drafter is not None and not count:
                drafter.untried()
        return [
            drafter.draft.tokens[:count] if drafter is not None else []
            for drafter, count in zip(drafters, counts, strict=True)
        ]

    def _draft(self, row: Draftable) -> Drafter | None:
        """Let a row draft; None if it has nothing to try."""
        if not row.draftable or row.left < 2:
            return None
        if row.drafter is None:
            row.drafter = Drafter(self._shares)
        drafter = row.drafter
        drafter.lookup.extend(row.context(len(drafter.lookup)))
        drafter.draft = drafter.lookup.draft(min(self._most, row.left - 1))
        return drafter if drafter.draft.tokens else None

    def confirmed(self, row: Draftable, drafted: int, right: int) -> None:
        if drafted and row.drafter is not None:
            run = row.drafter.draft.run
            self._shares[run] = _learned(self._shares[run], drafted, right, _EMA_WEIGHT / 10)
            row.drafter.confirmed(drafted, right)

    def _counts(
        self,
        rows: Sequence[Draftable],
        drafters: Sequence[Drafter | None],
        planned: StepSize,
        most: float,
    ) -> list[int]:
        """Draft tokens by row: the likeliest first, as long as each makes more tokens a second and the
        step takes `most` seconds at most."""
        counts = [0] * len(rows)
        cost = self._pacing.cost
        if not cost.known:
            return counts
        places = sorted(
            (
                (drafter.share**place, -place, i)
                for i, drafter in enumerate(drafters)
                if drafter is not None
                for place in range(1, len(drafter.draft.tokens) + 1)
            ),
            reverse=True,
        )
        each, key = (float(rate) for rate in cost.rates[2:])
        made, seconds = float(len(rows)), cost.seconds(planned)
        best = made / seconds if seconds else 0.0
        chosen = list(counts)
        for share, place, i in places:
            if place != -(chosen[i] + 1):
                continue
            seconds += each + key * rows[i].length
            made += share
            chosen[i] += 1
            if seconds > most:
                break
            if seconds and made / seconds > best:
                best, counts = made / seconds, list(chosen)
        return counts
