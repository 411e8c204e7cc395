"""What the engine's prompts and rows find in the prefix cache, and what they leave there. Pure."""

from __future__ import annotations

from millrace.cache.index import PrefixIndex
from millrace.cache.observations import AnyObservation
from millrace.cache.operations import Source
from millrace.cache.residency import Operations
from millrace.engine.books import Job, Seat


class CacheUse:
    def __init__(self, index: PrefixIndex, every: int, *, uncut: bool) -> None:
        self.index = index
        self._every = every
        """Tokens between checkpoints where nothing else asks for one."""
        self._uncut = uncut
        """Some of the model's state is kept at places only."""

    def expect(self, job: Job, out: Operations) -> None:
        """A prompt has come: see what is known of it, and begin to read what is on disk."""
        self._pause(job)
        if not job.wants_logprobs:
            job.known = self.index.known(job.salt, _reusable(job))
            job.ticket = self.index.fetch(out, job.salt, _reusable(job))
            job.blocked = self.index.waits(job.ticket)

    def narrowed(self, job: Job) -> None:
        """Some of the prompt is left out, of which nothing had been known."""
        self._pause(job)
        job.known = min(job.known, job.exact)

    def _pause(self, job: Job) -> None:
        if self._uncut:
            last = min(len(job.tokens) - 1, job.exact)
            steps = range(self._every, last, self._every)
            boundaries = [b for b in job.request.boundaries if b < last]
            job.pauses = sorted({*steps, *boundaries, last})

    def observe(
        self, events: list[AnyObservation], jobs: list[Job], out: Operations, now: float
    ) -> None:
        """Learn what the disk has brought, for those that wait for it too."""
        for event in events:
            self.index.observe(out, event, now)
        for job in jobs:
            job.blocked = job.blocked and self.index.waits(job.ticket)

    def begin(self, job: Job, out: Operations, now: float) -> None:
        """A prompt is about to run: what is known need not be."""
        found = self.index.restore(out, job.number, job.salt, _reusable(job), job.ticket, now)
        job.ticket = None
        if found is not None:
            job.done = found.at
            if not job.demoted:
                job.hit, job.cached = found.hit, found.at

    def ran(self, job: Job, out: Operations, now: float) -> None:
        """A chunk of a prompt has been launched."""
        end = job.done == len(job.tokens) - 1
        boundary = end or job.done in job.request.boundaries
        pause = boundary or job.done in job.pauses
        if job.done > job.exact:
            boundary = pause = False
        job.written += self._keep(job, out, now, state=pause, boundary=boundary)

    def dropped(self, job: Job, out: Operations, now: float) -> None:
        """A prompt is given up half-way: whoever asks again goes on from here."""
        if self._uncut and 0 < job.done <= job.exact:
            self._keep(job, out, now, state=True, boundary=False)

    def unwanted(self, job: Job) -> None:
        """A prompt is given up before it began."""
        self.index.abandon(job.ticket)
        job.ticket, job.blocked = None, False

    def _keep(self, job: Job, out: Operations, now: float, *, state: bool, boundary: bool) -> int:
        return self.index.keep(
            out,
            Source("job", job.number),
            job.salt,
            job.tokens[: min(job.done, job.exact)],
            state=state,
            boundary=boundary,
            now=now,
            owner=job.request.id,
        )

    def row(self, seat: Seat, out: Operations, now: float) -> None:
        """A row leaves the batch."""
        if seat.kept is not None:
            return  # what of it is exact was kept when its prompt ran
        tokens = [*seat.keys, *seat.tokens]
        # A token that was drawn and never read may have been run: what follows it is unknown.
        known = seat.held <= len(tokens)
        self.index.keep(
            out,
            Source("row", seat.number),
            seat.request.cache_salt,
            tokens[: seat.held],
            state=known,
            boundary=True,
            now=now,
            owner=seat.request.id,
        )


def _reusable(job: Job) -> list[int]:
    """The tokens whose state may be another's: none after one that is left out. Of those that are looked
    for, one is always left to run."""
    return job.tokens if job.kept is None else job.tokens[: job.exact + 1]
