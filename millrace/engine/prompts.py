"""Prompts on their way into the batch: begun, run step by step, given up for others, and what a step
brought.

Which of them run is the scheduler's, how many tokens is the pacing's; the batch it does not know. Pure:
what is to be done goes into the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.books import Job, Seat, Stage
from millrace.engine.cache_use import CacheUse
from millrace.engine.pacing import Pacing, StepSize, prompt_size
from millrace.engine.pictures import Pictures
from millrace.engine.requests import RequestBook, TurnDraft
from millrace.engine.scheduler import Scheduler
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
        self._planned: list[tuple[Job, int]] = []
        """The prompts of the last turn's pass, and how many tokens of each it ran."""
        self.other = False
        """Whether this turn runs a picture or the draft beside its step."""

    @property
    def running(self) -> bool:
        """Whether it is not known yet what the last pass brought."""
        return bool(self._planned)

    def begin(self, job: Job, draft: TurnDraft) -> None:
        job.known = 0
        kept = job.kept.ranges if job.kept is not None else ()
        draft.out.append(Begin(job.number, [s.number for s in job.seats], job.wants_logprobs, kept))
        if self._cache is not None and not job.wants_logprobs:
            self._cache.begin(job, draft.out, draft.now)
        if job.request.media:
            self._pictures.begun(job)
        _report(job, draft)

    def plan(
        self, running: Sequence[Seat], planned: StepSize, draft: TurnDraft
    ) -> tuple[list[PromptRun], StepSize]:
        """The prompts of this step, as many tokens as the promise allows, and the size of it all."""
        self._planned, self.other = [], False
        if self.something_else(draft, planned):
            return [], planned
        while (count := self._next(running, planned, draft.now)) is not None:
            job, tokens = count
            planned += prompt_size(job.done, tokens)
            self._planned.append((job, tokens))
            if not self._flat or job.request.media or job.wants_logprobs:
                break
        if self._planned:
            self._saw = self._scored = False
        elif not self.encode(draft, planned):
            self.score(draft, planned)
        return [PromptRun(job.number, count) for job, count in self._planned], planned

    def _next(
        self, running: Sequence[Seat], planned: StepSize, now: float
    ) -> tuple[Job, int] | None:
        """The prompt that comes next and how many of its tokens, if there is room for any."""
        taken = [job for job, _ in self._planned]
        if taken and not self._pacing.room(planned, 0, 1):
            return None
        # What one prompt computes, another finds in the cache.
        shared = taken if self._cache is not None else []
        job = self._scheduler.next_prompt(running, now, taken, shared)
        if job is None:
            return None
        left = job.reach
        if job.wants_logprobs:
            left = min(left, LOGPROB_CHUNK)
        room = self._pacing.room(planned, job.done, left)
        count = max(room, self._pacing.progress(len(taken), left))
        if not count:
            return None
        return job, min(self._pictures.uncut(job, count), job.left)

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
        for job, count in planned:
            if job.stage is Stage.OVER:
                continue
            problem = outcome.prompt_faults.get(job.number)
            if problem is not None:
                self._scheduler.discard(job)
                text = f"The prompt could not be run: {problem}"
                self._requests.fail(job.request.id, text, draft)
                continue
            job.done += count
            if self._cache is not None:
                self._cache.ran(job, draft.out, draft.now)
            self._scheduler.ran(job)
            _report(job, draft)

    def demote(self, job: Job, draft: TurnDraft) -> None:
        """A prompt that is under way gives its memory up; what it has may be found again."""
        if self._cache is not None and job.done:
            self._cache.dropped(job, draft.out, draft.now)
        draft.out.append(Release(job.number))
        self._scheduler.demote(job)


def _report(job: Job, draft: TurnDraft) -> None:
    if not job.quiet:
        draft.turn.progress.append(job.progress())
