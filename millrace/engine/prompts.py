"""Prompts on their way into the batch: begun, run chunk by chunk, given up for others, and what a chunk
brought.

Which of them run, and how many tokens at once, is the scheduler's; the batch it does not know. Pure: what
is to be done goes into the draft.
"""

from __future__ import annotations

from millrace.engine.books import Job, Stage
from millrace.engine.cache_use import CacheUse
from millrace.engine.latency_model import IDLE_SECONDS
from millrace.engine.learning import Learning
from millrace.engine.memory import Budget
from millrace.engine.pictures import Pictures
from millrace.engine.requests import RequestBook, TurnDraft
from millrace.engine.scheduler import Scheduler
from millrace.engine.shapes import Shapes
from millrace.engine.specprefill.scorings import Scorings
from millrace.engine.turn import Begin, Chunk, Outcome, Release

PICTURE_SHARE = 0.6
"""Of the time between two steps that a chunk may take, what a part of a picture may: its pixels come and
are handed on in the same gaps."""
LOGPROB_CHUNK = 128
"""Logits of a whole chunk are wide: prompts that want logprobs are run in small ones."""


class Prompts:
    def __init__(
        self,
        scheduler: Scheduler,
        requests: RequestBook,
        budget: Budget,
        shapes: Shapes,
        learning: Learning,
        cache: CacheUse | None,
        pictures: Pictures,
        scorings: Scorings | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._budget = budget
        self._shapes = shapes
        self._learning = learning
        self._cache = cache
        self._pictures = pictures
        self._scorings = scorings
        self._saw = False
        """The last that was run was a picture."""
        self._scored = False
        """The last that was run was the draft."""
        self._chunk: list[tuple[Job, int]] = []
        """The prompts of the last turn's chunk, and how many tokens of each it ran."""

    @property
    def running(self) -> bool:
        """Whether it is not known yet what the last chunk brought."""
        return bool(self._chunk)

    def begin(self, job: Job, draft: TurnDraft) -> None:
        job.known = 0
        rows, width = [s.number for s in job.seats], self._budget.width(job.length)
        kept = job.kept.ranges if job.kept is not None else ()
        draft.out.append(Begin(job.number, rows, width, job.wants_logprobs, kept))
        if self._cache is not None and not job.wants_logprobs:
            self._cache.begin(job, draft.out, draft.now)
        if job.request.media:
            self._pictures.begun(job)
        _tell(job, draft)

    def run(self, jobs: list[Job], count: int, draft: TurnDraft, *, wait: bool) -> None:
        """Run so many more tokens of each; `wait` where nobody else is served meanwhile."""
        self._saw = self._scored = False
        length = self._shapes.length(count)
        if len(jobs) == 1:
            job = jobs[0]
            if job.wants_logprobs:
                count = min(count, LOGPROB_CHUNK)
            count = self._pictures.uncut(job, count)
            as_it_is = job.wants_logprobs or count < job.left
            length = count if as_it_is else self._shapes.length(count)
            length = max(count, min(length, self._budget.width(job.length) - job.done))
        self._chunk = [(job, min(count, job.left)) for job in jobs]
        draft.out.append(Chunk([j.number for j in jobs], count, length, wait=wait))
        shape = (len(jobs), length, jobs[0].done + length) if self._shapes.recurring else None
        self._learning.chunk(len(jobs) * length, shape)

    def something_else(self, draft: TurnDraft, running: int) -> bool:
        """Run a picture or the draft in place of a chunk, where it is their turn."""
        if self.picture_first and self.encode(draft, running):
            return True
        return self.draft_first and self.score(draft, running)

    @property
    def picture_first(self) -> bool:
        """Whether a picture waits whose turn it is: chunks and pictures take turns."""
        return self._pictures.waits and not self._saw

    def encode(self, draft: TurnDraft, running: int) -> bool:
        """Run the vision tower on a picture in place of a chunk, if one waits; in parts that so many
        running rows hardly feel, or after which others are heard soon enough."""
        spare = PICTURE_SHARE * self._learning.spare(running) if running else IDLE_SECONDS
        picture = self._pictures.encode(self._scheduler.seeing(), spare)
        if picture is None:
            return False
        self._saw = True
        draft.out.append(picture)
        self._learning.other()
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
        """Whether the draft has something to do whose turn it is: chunks and the draft take turns."""
        return self.scoring and not self._scored

    def score(self, draft: TurnDraft, running: int) -> bool:
        """Let the draft work in place of a chunk, if a prompt waits for it; in parts that so many running
        rows hardly feel."""
        if self._scorings is None or not self._scorings.busy:
            return False
        spare = self._learning.spare(running) if running else None
        if not self._scorings.plan(draft.out, draft.now, spare):
            return False
        self._scored = True
        self._learning.other()
        if (seconds := self._scorings.expected) is not None:
            draft.turn.expected = self._learning.step_seconds(running) + seconds
        draft.turn.scoring = self._scorings.progress()
        return True

    def ran(self, outcome: Outcome, draft: TurnDraft) -> None:
        """Learn what the last turn's chunk brought, or the draft's work."""
        if self._scorings is not None:
            gap = outcome.gap
            if gap is not None:
                gap = max(0.0, gap - self._learning.step_seconds(len(outcome.rows)))
            found = self._scorings.ran(outcome.scorings, gap, draft.out, draft.now)
            if found is not None:
                self._requests.scored(found, draft)
        chunk, self._chunk = self._chunk, []
        if outcome.chunk_fault is not None:
            for job, _ in chunk:
                if job.stage is Stage.OVER:
                    continue
                if len(chunk) == 1:
                    self._scheduler.discard(job)
                    text = f"The prompt could not be run: {outcome.chunk_fault}"
                    self._requests.fail(job.request.id, text, draft)
                else:
                    job.alone = True
                    self._scheduler.demote(job)
            return
        for job, count in chunk:
            if job.stage is Stage.OVER:
                continue
            job.done += count
            if self._cache is not None:
                self._cache.ran(job, draft.out, draft.now)
            self._scheduler.ran(job)
            _tell(job, draft)

    def demote(self, job: Job, draft: TurnDraft) -> None:
        """A prompt that is under way gives its memory up; what it has may be found again."""
        if self._cache is not None and job.done:
            self._cache.dropped(job, draft.out, draft.now)
        draft.out.append(Release(job.number))
        self._scheduler.demote(job)


def _tell(job: Job, draft: TurnDraft) -> None:
    if not job.quiet:
        draft.turn.progress.append(job.progress())
