"""The prompts that a draft looks at before the model runs them: whose turn it is, and how much of it runs
beside a step of the batch.

Pure. One prompt is scored at a time, the most important first and then in the order of arrival; what the
draft takes is learnt by itself. A prompt that is given up meanwhile is let go of.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import cast

from millrace.cache.operations import AnyOperation
from millrace.cache.residency import Operations
from millrace.engine.cache_use import CacheUse
from millrace.engine.memory import StateCost
from millrace.engine.pacing import IDLE, LEAST, StepCost, StepSize, prompt_size
from millrace.engine.sequences import Prefill, Stage
from millrace.engine.specprefill.operations import (
    BeginScoring,
    ChooseTokens,
    DraftCache,
    EndScoring,
    LookAhead,
    ScoreChunk,
    ScoringResult,
)
from millrace.engine.specprefill.selection import Kept, worthwhile
from millrace.protocol import Submit
from millrace.protocol.specprefill import Scoring, Selected
from millrace.sizes import format_bytes

AHEAD = 8
"""Tokens that the draft goes on by: what they look at is what matters."""
_SPARE = 0.8
"""The part of what running rows can spare that a chunk is planned to take: it is judged from those before
it, and attention to a longer state takes more."""
_FIRST = 32
"""Tokens of the first chunk beside running rows, before it is known what one takes."""


@dataclass(frozen=True)
class DraftFacts:
    """What the decider is told of a draft."""

    cost: StateCost
    room: int
    """Bytes that the state of a prompt may take."""
    chunk: int
    """The most tokens of a chunk."""
    window: int = 0
    """How far back the sliding windows of the model look that the draft works for."""
    vocabulary: int | None = None
    """Token ids that it has, where the model may be given others."""

    def state(self, length: int) -> int:
        """Bytes of the state of a prompt of this many tokens, those of the look ahead included."""
        return self.cost.row(length + AHEAD)


@dataclass
class _Current:
    """The prompt that the draft has at hand."""

    prefill: Prefill
    """Of the model."""
    mine: Prefill
    """The same for the draft, and for its cache."""
    ahead: int = 0
    planned: int = 0
    """Tokens of the last turn's chunk."""
    looked: int = 0
    """Steps of the last turn."""
    began: float = 0.0


@dataclass(frozen=True)
class Scored:
    """A prompt that the draft has done with."""

    prefill: Prefill
    """Of the model."""
    kept: Kept | None = None
    told: Selected | None = None
    """What the front hears of it."""
    problem: str | None = None


class Scorings:
    def __init__(self, facts: DraftFacts, cache: CacheUse | None) -> None:
        """`cache` is the draft's own."""
        self._facts = facts
        self._cache = cache
        self._numbers = itertools.count(1)
        self._waiting: list[Prefill] = []
        self._current: _Current | None = None
        self._cost = StepCost()
        self._steps = 0.0
        """What a step of the look ahead takes, as measured lately."""
        self.expected: float | None = None
        """Seconds that what was planned last should take, where that is known."""

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    @property
    def facts(self) -> DraftFacts:
        return self._facts

    def wanted(self, request: Submit, known: int) -> bool:
        """Whether a request's prompt is to be scored, of which the state of so many tokens is known."""
        sparse = request.sparse
        if sparse is None or sparse.kept is not None or request.prompt_logprobs is not None:
            return False
        if any(choice.generated for choice in request.choices):
            return False  # it has run whole before
        return worthwhile(sparse, len(request.prompt), known, self._facts.window)

    def problem(self, request: Submit) -> str | None:
        """Why a prompt cannot be scored."""
        most = self._facts.vocabulary
        if most is not None and (highest := max(request.prompt)) >= most:
            return (
                f"The draft of SpecPrefill has {most} tokens, and the prompt has one with the id "
                f"{highest}. Send it with specprefill false."
            )
        needed = self._facts.state(len(request.prompt))
        if needed <= self._facts.room:
            return None
        return (
            f"The draft of SpecPrefill needs {format_bytes(needed)} for this prompt and has "
            f"{format_bytes(self._facts.room)}. Shorten it, or send it with specprefill false."
        )

    def add(self, prefill: Prefill) -> None:
        prefill.unscored = True
        self._waiting.append(prefill)

    def clear(self, out: Operations) -> None:
        """Forget what the draft's cache holds."""
        if self._cache is not None:
            found: Operations = []
            self._cache.index.clear(found)
            self._wrap(found, out)

    @property
    def cached_bytes(self) -> int:
        return self._cache.index.nbytes if self._cache is not None else 0

    # What to do

    def plan(self, out: Operations, now: float, spare: float | None) -> bool:
        """Go on with the prompt at hand, or begin another, for about `spare` seconds beside a step; None
        where nobody waits for one. Returns whether there was something to do."""
        self._tidy(out)
        if self._current is None and not self._begin(out, now):
            return False
        current = self._current
        assert current is not None
        mine, wait = current.mine, spare is None
        if mine.left > 0:
            count = min(self._count(mine, spare), mine.reach)
            current.planned = count
            out.append(ScoreChunk(mine.number, count, wait=wait))
            size = StepSize(steps=1) + prompt_size(mine.done, count)
            self.expected = self._cost.seconds(size) if self._cost.known else None
            return True
        steps = AHEAD - current.ahead
        if spare is not None:
            steps = min(steps, max(1, int(spare / self._steps) if self._steps else 1))
        current.looked = steps
        out.append(LookAhead(mine.number, steps, wait=wait))
        if current.ahead + steps == AHEAD:
            known = current.prefill.known
            out.append(ChooseTokens(mine.number, known, self._facts.window))
        self.expected = self._steps * steps or None
        return True

    def ran(
        self, results: list[ScoringResult], gap: float | None, out: Operations, now: float
    ) -> Scored | None:
        """Learn what the last turn brought: the prompt at hand, if it is done or has failed. `gap` is by
        how much a step was longer, where it was not timed by itself."""
        current = self._current
        if current is None:
            return None
        mine = current.mine
        found = [r for r in results if r.prefill == mine.number]
        planned, looked = current.planned, current.looked
        current.planned = current.looked = 0
        if not found:
            return None
        if (problem := next((r.problem for r in found if r.problem is not None), None)) is not None:
            self._current = None
            return Scored(current.prefill, problem=problem)
        seconds = found[0].seconds if found[0].seconds is not None else gap
        if planned:
            if seconds is not None:
                self._cost.saw(StepSize(steps=1) + prompt_size(mine.done, planned), seconds)
            mine.done += planned
            if self._cache is not None:
                cached: Operations = []
                self._cache.ran(mine, cached, now)
                self._wrap(cached, out)
        elif looked:
            current.ahead += looked
            if seconds is not None:
                each = seconds / looked
                self._steps += 0.5 * (each - self._steps) if self._steps else each
        chosen = next((r.kept for r in found if r.kept is not None), None)
        if chosen is None:
            return None
        out.append(EndScoring(mine.number))
        self._current = None
        kept = Kept.of(chosen, mine.length)
        told = Selected(
            id=mine.request.id,
            kept=list(kept.ranges),
            scored=kept.total,
            run=kept.total - mine.cached,
            seconds=now - current.began,
        )
        return Scored(current.prefill, kept, told)

    def progress(self) -> list[Scoring]:
        """How far the draft is with the prompt at hand."""
        if self._current is None:
            return []
        mine = self._current.mine
        return [Scoring(mine.request.id, mine.done, mine.length)]

    def _count(self, mine: Prefill, spare: float | None) -> int:
        """Tokens of a chunk that takes no longer than can be spared."""
        most = min(mine.left, self._facts.chunk)
        if not self._cost.known:
            return most if spare is None else min(most, _FIRST)
        seconds = IDLE if spare is None else _SPARE * spare
        low, high = min(LEAST, most), most
        while low < high:
            middle = (low + high + 1) // 2
            size = StepSize(steps=1) + prompt_size(mine.done, middle)
            low, high = (middle, high) if self._cost.seconds(size) <= seconds else (low, middle - 1)
        return low

    def _tidy(self, out: Operations) -> None:
        self._waiting = [j for j in self._waiting if j.stage is not Stage.OVER]
        current = self._current
        if current is not None and current.prefill.stage is Stage.OVER:
            out.append(EndScoring(current.mine.number))
            self._current = None

    def _begin(self, out: Operations, now: float) -> bool:
        if not self._waiting:
            return False
        prefill = min(self._waiting, key=lambda j: (-j.priority, j.arrived, j.number))
        self._waiting.remove(prefill)
        mine = Prefill(
            next(self._numbers),
            prefill.request,
            prefill.sequences[:1],
            prefill.request.prompt,
            prefill.arrived,
        )
        self._current = _Current(prefill, mine, began=now)
        out.append(BeginScoring(mine.number, prefill.sequences[0].number))
        if self._cache is not None:
            found: Operations = []
            self._cache.expect(mine, found)
            mine.known = 0
            self._cache.begin(mine, found, now)
            self._wrap(found, out)
        return True

    def _wrap(self, operations: Operations, out: Operations) -> None:
        out += [DraftCache(cast(AnyOperation, operation)) for operation in operations]
