"""Prompts on their way into the batch: begun, run step by step, given up for others, and what a step
brought.

Which of them run is the scheduler's, how many tokens is the pacing's; the batch it does not know. Pure:
what is to be done goes into the draft.
"""

from __future__ import annotations

from collections import abc

from millrace.engine.cache_use import CacheUse
from millrace.engine.pacing import Pacing, StepSize, prompt_size
from millrace.engine.pictures import Pictures
from millrace.engine.requests import RequestBook, TurnDraft
from millrace.engine.scheduler import Scheduler
from millrace.engine.sequences import Prefill, Sequence, Stage
from millrace.engine.specprefill.scorings import Scorings
from millrace.engine.turn import Begin, Outcome, PromptRun, Release

LOGPROB_CHUNK = 128
"""Logits of many tokens are wide: prompts that want logprobs are run in small parts."""


class Prompts:
    def __init__(
        self,
        scheduler: Scheduler,
        requests: RequestBook,
        pacing: Pacing,
        cache: CacheUse | None,
        pictures: Pictures,
        scorings: Scorings | None = None,
        *,
        flat: bool = True,
    ) -> None:
        """`flat` says that several prompts may be parts of one pass."""
        self._scheduler = scheduler
        self._requests = requests
        self._pacing = pacing
        self._cache = cache
        self._pictures = pictures
        self._scorings = scorings
        self._flat = flat
        self._saw = False
        """The last that was run was a picture."""
        self._scored = False
        """The last that was run was the draft."""
        self._planned: list[tuple[Prefill, int]] = []
        """The prompts of the last turn's pass, and how many tokens of each it ran."""
        self.other = False
        """Whether this turn runs a picture or the draft beside its step."""

    @property
    def running(self) -> bool:
        """Whether it is not known yet what the last pass brought."""
        return bool(self._planned)

    def begin(self, prefill: Prefill, draft: TurnDraft) -> None:
        prefill.known = 0
        kept = prefill.kept.ranges if prefill.kept is not None else ()
        draft.out.append(
            Begin(
                prefill.number, [s.number for s in prefill.sequences], prefill.wants_logprobs, kept
            )
        )
        if self._cache is not None and not prefill.wants_logprobs:
            self._cache.begin(prefill, draft.out, draft.now)
        if prefill.request.media:
            self._pictures.begun(prefill)
        _report(prefill, draft)

    def plan(
        self, running: abc.Sequence[Sequence], planned: StepSize, draft: TurnDraft
    ) -> tuple[list[PromptRun], StepSize]:
        """The prompts of this step, as many tokens as the promise allows, and the size of it all."""
        self._planned, self.other = [], False
        if self.something_else(draft, planned):
            return [], planned
        while (count := self._next(running, planned, draft.now)) is not None:
            prefill, tokens = count
            planned += prompt_size(prefill.done, tokens)
            self._planned.append((prefill, tokens))
            if not self._flat or prefill.request.media or prefill.wants_logprobs:
                break
        if self._planned:
            self._saw = self._scored = False
        elif not self.encode(draft, planned):
            self.score(draft, planned)
        return [PromptRun(prefill.number, count) for prefill, count in self._planned], planned

    def _next(
        self, running: abc.Sequence[Sequence], planned: StepSize, now: float
    ) -> tuple[Prefill, int] | None:
        """The prompt that comes next and how many of its tokens, if there is room for any."""
        taken = [prefill for prefill, _ in self._planned]
        if taken and not self._pacing.room(planned, 0, 1):
            return None
        # What one prompt computes, another finds in the cache.
        shared = taken if self._cache is not None else []
        prefill = self._scheduler.next_prompt(running, now, taken, shared)
        if prefill is None:
            return None
        left = prefill.reach
        if prefill.wants_logprobs:
            left = min(left, LOGPROB_CHUNK)
        room = self._pacing.room(planned, prefill.done, left)
        count = max(room, self._pacing.progress(len(taken), left))
        if not count:
            return None
        return prefill, min(self._pictures.uncut(prefill, count), prefill.left)

    def something_else(self, draft: TurnDraft, planned: StepSize) -> bool:
        """Run a picture or the draft in place of prompts, where it is their turn."""
        if self.picture_first and self.encode(draft, planned):
            return True
        return self.draft_first and self.score(draft, planned)

    @property
    def picture_first(self) -> bool:
        """Whether a picture waits whose turn it is: prompts and pictures take turns."""
        return self._pictures.waits and not self._saw

    def encode(self, draft: TurnDraft, planned: StepSize) -> bool:
        """Run the vision tower on a picture in place of prompts, if one waits; in parts that keep the
        promise beside what is planned."""
        picture = self._pictures.encode(self._scheduler.seeing(), self._pacing.spare(planned))
        if picture is None:
            return False
        self._saw = self.other = True
        draft.out.append(picture)
        return True

    @property
    def draft_cached(self) -> int:
        return self._scorings.cached_bytes if self._scorings is not None else 0

    @property
    def scoring(self) -> bool:
        """Whether the draft has something to do."""
        return self._scorings is not None and self._scorings.busy

    @property
    def draft_first(self) -> bool:
        """Whether the draft has something to do whose turn it is: prompts and the draft take turns."""
        return self.scoring and not self._scored

    def score(self, draft: TurnDraft, planned: StepSize) -> bool:
        """Let the draft work in place of prompts, if one waits for it; in parts that keep the promise
        beside what is planned."""
        if self._scorings is None or not self._scorings.busy:
            return False
        spare = self._pacing.spare(planned) if planned.sequences else None
        if not self._scorings.plan(draft.out, draft.now, spare):
            return False
        self._scored = self.other = True
        draft.turn.scoring = self._scorings.progress()
        return True

    def ran(self, outcome: Outcome, draft: TurnDraft, step_seconds: float) -> None:
        """Learn what the last turn's pass brought, or the draft's work; the step that was read takes so
        many seconds by itself."""
        if self._scorings is not None:
            gap = None if outcome.gap is None else max(0.0, outcome.gap - step_seconds)
            found = self._scorings.ran(outcome.scorings, gap, draft.out, draft.now)
            if found is not None:
                self._requests.scored(found, draft)
        planned, self._planned = self._planned, []
        for prefill, count in planned:
            if prefill.stage is Stage.OVER:
                continue
            problem = outcome.prompt_faults.get(prefill.number)
            if problem is not None:
                self._scheduler.discard(prefill)
                text = f"The prompt could not be run: {problem}"
                self._requests.fail(prefill.request.id, text, draft)
                continue
            prefill.done += count
            if self._cache is not None:
                self._cache.ran(prefill, draft.out, draft.now)
            self._scheduler.ran(prefill)
            _report(prefill, draft)

    def demote(self, prefill: Prefill, draft: TurnDraft) -> None:
        """A prompt that is under way gives its memory up; what it has may be found again."""
        if self._cache is not None and prefill.done:
            self._cache.dropped(prefill, draft.out, draft.now)
        draft.out.append(Release(prefill.number))
        self._scheduler.demote(prefill)


def _report(prefill: Prefill, draft: TurnDraft) -> None:
    if not prefill.quiet:
        draft.turn.progress.append(prefill.progress())
