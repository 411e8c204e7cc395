"""What the engine's prompts and rows find in the prefix cache, and what they leave there."""

from __future__ import annotations

from typing import Any

from millrace.cache.prefix import PrefixCache
from millrace.cache.state import KVSegment, Layout, StateCheckpoint, checkpoint_of, from_caches
from millrace.engine.batch import Batch
from millrace.engine.prefill import Job


class CacheUse:
    def __init__(self, cache: PrefixCache, layout: Layout, every: int) -> None:
        self.cache = cache
        self._layout = layout
        self._every = every
        """Tokens between checkpoints where nothing else asks for one."""

    def expect(self, job: Job) -> None:
        """A prompt has come: see what is known of it, and begin to read what is on disk."""
        if self._layout.rest:
            last = len(job.tokens) - 1
            steps = range(self._every, last, self._every)
            boundaries = [b for b in job.request.boundaries if b < last]
            job.pauses = sorted({*steps, *boundaries, last})
        if not job.wants_logprobs:
            job.known = self.cache.known(job.salt, job.tokens)
            job.ticket = self.cache.fetch(job.salt, job.tokens)

    def begin(self, job: Job) -> None:
        """A prompt is about to run: what is known need not be."""
        job.known = 0
        if job.wants_logprobs or job.caches:
            return
        found = self.cache.restore(job.salt, job.tokens, job.ticket)
        job.ticket = None
        if found is not None:
            job.caches, job.hit = found.caches, found.hit
            job.done = job.cached = found.at

    def ran(self, job: Job) -> None:
        """A chunk of a prompt has been launched."""
        end = job.done == len(job.tokens) - 1
        boundary = end or job.done in job.request.boundaries
        pause = boundary or job.done in job.pauses
        job.written += self._job(job, state=pause, boundary=boundary)

    def dropped(self, job: Job) -> None:
        """A prompt is given up half-way: whoever asks again goes on from here."""
        if job.caches and self._layout.rest:
            self._job(job, state=True, boundary=False)

    def _job(self, job: Job, *, state: bool, boundary: bool) -> int:
        source = _Alone(self._layout, job.caches)
        tokens = job.tokens[: job.done]
        return self.cache.keep(job.salt, tokens, source, state=state, boundary=boundary)

    def row(self, batch: Batch, index: int) -> None:
        """A row leaves the batch."""
        row, length = batch.rows[index], batch.length(index)
        tokens = [*row.request.prompt, *row.tokens]
        # A token that was drawn and never read may have been run: what follows it is unknown.
        known = length <= len(tokens)
        source = _InBatch(self._layout, batch, index)
        salt = row.request.cache_salt
        self.cache.keep(salt, tokens[:length], source, state=known, boundary=True)


class _Alone:
    def __init__(self, layout: Layout, caches: list[Any]) -> None:
        self._layout = layout
        self._caches = caches

    def segment(self, start: int, end: int, pack: bool) -> KVSegment:
        return from_caches(self._layout, self._caches, start, end, pack)

    def checkpoint(self) -> StateCheckpoint:
        return checkpoint_of(self._layout, self._caches)


class _InBatch:
    def __init__(self, layout: Layout, batch: Batch, index: int) -> None:
        self._layout = layout
        self._batch = batch
        self._index = index

    def segment(self, start: int, end: int, pack: bool) -> KVSegment:
        return from_caches(self._layout, self._batch.views(self._index), start, end, pack)

    def checkpoint(self) -> StateCheckpoint:
        return checkpoint_of(self._layout, self._batch.extract(self._index, self._layout.rest))
