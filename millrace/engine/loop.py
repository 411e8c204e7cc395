"""The engine's loop: hear, let rows leave and join, launch a step, read the last one, prefill a chunk.

Runs on the one thread that owns MLX. The order within a turn keeps the device busy: the next forward
pass is launched before the tokens of the last draw are read.
"""

from __future__ import annotations

import logging
from typing import Any

from millrace.config import EngineConfig
from millrace.engine.batch import Batch
from millrace.engine.link import Link
from millrace.engine.prefill import Job, jobs_of
from millrace.engine.sampler import Sampler
from millrace.engine.scheduler import Scheduler
from millrace.protocol import (
    Abort,
    AbortChoice,
    Failed,
    Prefilled,
    RowTokens,
    Shutdown,
    Step,
    Submit,
    ToEngine,
)

log = logging.getLogger("millrace.engine")


class Engine:
    def __init__(self, model: Any, config: EngineConfig, sampler: Sampler, link: Link) -> None:
        self._model = model
        self._link = link
        self._batch = Batch(model, sampler)
        self._scheduler = Scheduler(config.max_running, config.prefill_chunk)
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            self.turn()

    @property
    def busy(self) -> bool:
        return bool(self._batch) or self._scheduler.busy

    def turn(self) -> None:
        for message in self._link.receive(wait=not self.busy):
            self._hear(message)
        if self._stopping:
            return
        step = Step()
        in_flight = self._batch.in_flight()
        self._batch.drop({i for i, r in enumerate(self._batch.rows) if r.gone or r.spent})
        for job in self._scheduler.prefilled():
            job.open(self._model)
            self._batch.join(job.rows, job.caches, job.tokens[-1])
        if self._batch:
            self._batch.forward()
        for row, token in in_flight.read():
            finish = row.accept(token)
            row.gone = finish is not None
            step.rows.append(RowTokens(row.request.id, row.choice, [token], finish))
        if self._batch:
            self._batch.sample()
        self._prefill(step)
        if step.rows or step.prefilled:
            self._link.send(step)

    def _prefill(self, step: Step) -> None:
        planned = self._scheduler.next_chunk(running=len(self._batch))
        if planned is None:
            return
        job, count = planned
        try:
            job.run(self._model, count)
        except Exception as error:  # whatever a model raises fails this request alone
            log.exception("prefill of %s failed", job.request.id)
            self._scheduler.discard(job)
            self._link.send(Failed("request_failed", f"{error}", job.request.id))
            return
        step.prefilled.append(Prefilled(job.request.id, job.done, len(job.tokens), job.cached))

    def _hear(self, message: ToEngine) -> None:
        match message:
            case Submit():
                for job in jobs_of(message):
                    self._scheduler.add(job)
            case Abort(id=id):
                self._abort(id, None)
            case AbortChoice(id=id, choice=choice):
                self._abort(id, choice)
            case Shutdown():
                self._stopping = True

    def _abort(self, id: str, choice: int | None) -> None:
        def meant(job_or_row: Any) -> bool:
            return bool(job_or_row.request.id == id)

        for row in filter(meant, self._batch.rows):
            if choice is None or row.choice == choice:
                row.gone = True
        for job in [j for j in self._scheduler.jobs() if meant(j)]:
            self._drop_choice(job, choice)

    def _drop_choice(self, job: Job, choice: int | None) -> None:
        job.rows = [r for r in job.rows if choice is not None and r.choice != choice]
        if not job.rows:
            self._scheduler.discard(job)
