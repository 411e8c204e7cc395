"""Who runs next: a queue of prompts, prefilled in chunks between decode steps, first come first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from millrace.engine.prefill import Job


class Scheduler:
    def __init__(self, max_running: int, chunk: int) -> None:
        self._max_running = max_running
        self._chunk = chunk
        self._waiting: deque[Job] = deque()
        self._ready: list[Job] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._ready)

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def jobs(self) -> Iterator[Job]:
        yield from self._waiting
        yield from self._ready

    def discard(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._ready:
            self._ready.remove(job)

    def prefilled(self) -> list[Job]:
        """The jobs whose rows join the batch now."""
        ready, self._ready = self._ready, []
        return ready

    def next_chunk(self, running: int) -> tuple[Job, int] | None:
        """The prompt to go on with and how many of its tokens to run; a job ready to join moves on."""
        while self._waiting:
            job = self._waiting[0]
            if not job.done and running + len(job.rows) > max(self._max_running, len(job.rows)):
                return None
            if job.left == 0:
                self._ready.append(self._waiting.popleft())
                running += len(job.rows)
                continue
            count = min(self._chunk, job.left)
            if count == job.left:
                self._ready.append(self._waiting.popleft())
            return job, count
        return None
