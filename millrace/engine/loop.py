"""The engine's loop: hear, let rows leave and join, launch a step, read the last, prefill a chunk.

Runs on the one thread that owns MLX. The order within a turn keeps the device busy: the next
forward pass is launched before the tokens of the last draw are read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from millrace.config import EngineConfig
from millrace.engine.batch import Batch, PendingDraws
from millrace.engine.cache_use import CacheUse
from millrace.engine.grammar import Grammars
from millrace.engine.latency_model import LatencyModel
from millrace.engine.memory import Budget
from millrace.engine.prefill import Forward, Job, groupable, job_of, jobs_of, run_together, whole
from millrace.engine.row import Row
from millrace.engine.sampler import Sampler
from millrace.engine.scheduler import Scheduler
from millrace.engine.speculation import Speculation
from millrace.engine.transport import Transport
from millrace.flight import FlightRecorder, NullRecorder
from millrace.protocol import (
    Abort,
    AbortChoice,
    CacheQuery,
    CacheReport,
    Failed,
    FinishReason,
    Prefilled,
    PromptLogprobs,
    RowTokens,
    Shutdown,
    Step,
    Submit,
    TierReport,
    ToEngine,
    TokenLogprob,
)

log = logging.getLogger("millrace.engine")

CLOSING_SECONDS = 10.0
"""How long the disk may take to write what it has not at the end."""
PATIENCE = 120.0
"""Seconds that a turn may take before the front believes that it never ends."""
DISK_WAIT = 0.002
"""Seconds between looks at the disk while there is nothing else to do."""


class Engine:
    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        sampler: Sampler,
        budget: Budget,
        transport: Transport,
        grammars: Grammars | None = None,
        cache_use: CacheUse | None = None,
        forward: Forward = whole,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._recorder = recorder or NullRecorder()
        self._model = model
        self._cache_use = cache_use
        self._transport = transport
        self._budget = budget
        self._grammars = grammars
        self._batch = Batch(model, sampler)
        self._latency = LatencyModel(config.prefill_chunk or 512, config.max_stall)
        self._forward = forward
        self._scheduler: Scheduler[Job] = Scheduler(
            config.max_running, self._latency, budget, self._begin, config.burst
        )
        self._begun: list[Job] = []
        """Prompts that have started since the last message."""
        self._speculation = (
            Speculation(config.speculate, self._latency) if config.speculate else None
        )
        self._launched = 0
        """Tokens of the step in flight, guesses included."""
        self._groupable = groupable(make_prompt_cache(model))
        self._stopping = False
        self._last_read: float | None = None
        self._last_job: Job | None = None
        """Whose chunk may still be running on the device, while no row is."""
        self._chunks: deque[int] = deque([0, 0], maxlen=2)
        """Prompt tokens launched in the last two turns."""

    def run(self) -> None:
        while not self._stopping:
            self.turn()
        if self._cache_use is not None:
            self._cache_use.cache.close(CLOSING_SECONDS)

    @property
    def busy(self) -> bool:
        return bool(self._batch) or self._scheduler.busy

    @property
    def kv_bytes(self) -> int:
        held: int = sum(c.nbytes for job in self._scheduler.tasks() for c in job.caches)
        return self._batch.nbytes + held

    def turn(self) -> None:
        if not self.busy:
            self._recorder.idle()
        for message in self._transport.receive(self._wait()):
            self._receive(message)
        if self._stopping:
            return
        self._recorder.working([row.request.id for row in self._batch.rows], PATIENCE)
        step = Step()
        settled = self._settles
        in_flight = None if settled else self._batch.in_flight()
        if in_flight is None:
            self._read(step)
        pre_empted = self._leave()
        for job in self._scheduler.joining(self._lengths(), time.monotonic()):
            job.open(self._model)
            self._batch.join(job.rows, job.caches, job.tokens[-1])
        if self._batch:
            guesses = self._guesses() if settled else []
            self._launched = len(self._batch) * (1 + max(map(len, guesses), default=0))
            self._batch.forward(guesses)
        if in_flight is not None:
            self._take(step, in_flight)
        for row in pre_empted:
            if not row.gone:
                self._queue(job_of(row))
        if self._batch:
            self._batch.sample()
        self._prefill(step)
        if step.rows or step.prefilled or step.prompt_logprobs:
            step.running = len(self._batch)
            step.kv_bytes = self.kv_bytes
            if self._cache_use is not None:
                step.cache_bytes = self._cache_use.cache.nbytes
                step.cache_disk_bytes = self._cache_use.cache.disk_bytes
            self._transport.send(step)

    @property
    def _settles(self) -> bool:
        """Whether the last tokens are read before the next step is launched.

        Guesses need them. On a CPU that costs nothing: its draws are the host's own work.
        """
        return self._batch.guessing or self._speculation is not None

    def _guesses(self) -> list[list[int]]:
        if self._speculation is None or not self._batch.sliding:
            return []
        return self._speculation.propose(self._batch.rows)

    def _read(self, step: Step) -> None:
        if not self._batch.guessing:
            self._take(step, self._batch.in_flight())
            return
        for row, tokens, guessed, logprob in self._batch.settle():
            if not row.gone:
                if self._speculation is not None:
                    self._speculation.confirmed(row, guessed, len(tokens) - 1)
                self._received(step, row, tokens, logprob)
        self._measure(step)

    def _take(self, step: Step, in_flight: PendingDraws) -> None:
        """Read what was drawn, one token a row."""
        for row, token, logprob in in_flight.read():
            self._received(step, row, [token], logprob)
        self._measure(step)

    def _received(
        self, step: Step, row: Row, tokens: list[int], logprob: TokenLogprob | None
    ) -> None:
        """A row has made tokens; those after its end do not count."""
        kept: list[int] = []
        finish: FinishReason | None = None
        for token in tokens:
            kept.append(token)
            finish = row.accept(token)
            if finish is not None or row.problem is not None:
                break
        row.gone = finish is not None
        if row.problem is not None:
            self._stop(row, row.problem)
            return
        reported = [logprob] if logprob else []
        step.rows.append(RowTokens(row.request.id, row.choice, kept, finish, reported))

    def _wait(self) -> float | None:
        """How long to wait for messages: not at all while there is work."""
        idle = not self.busy
        again = self._cache_use.cache.tick(idle=idle) if self._cache_use else None
        if idle:
            return again
        return DISK_WAIT if not self._batch and self._scheduler.stuck else 0.0

    def _lengths(self) -> list[int]:
        return [r.length for r in self._batch.rows if not r.gone]

    def _queue(self, job: Job) -> None:
        if self._cache_use is not None:
            self._cache_use.expect(job)
        self._scheduler.add(job)

    def _begin(self, job: Job) -> None:
        if self._cache_use is not None:
            self._cache_use.begin(job)
            self._begun.append(job)

    def _leave(self) -> list[Row]:
        """Drop the rows that are done, and those that the memory no longer has room for."""
        batch = self._batch
        leaving = {i for i, r in enumerate(batch.rows) if r.gone or r.spent}
        staying = [i for i in range(len(batch)) if i not in leaving]
        rows = [batch.rows[i] for i in staying]
        victims = [staying[v] for v in self._scheduler.victims(rows, [r.length for r in rows])]
        for i in victims:
            log.info("request %s gives way: the key-value memory is full", batch.rows[i].request.id)
        for i in sorted(leaving | set(victims)):
            if self._cache_use is not None:
                self._cache_use.row(batch, i)
        pre_empted = [batch.rows[i] for i in victims]
        batch.drop(leaving | set(victims))
        return pre_empted

    def _measure(self, step: Step) -> None:
        """Learn from the time between two reads: a decode step, and the chunk that ran beside it.

        Whether that was the last turn's chunk or the one before depends on how far the device lags
        behind the host, so a step counts as undisturbed only without either.
        """
        now = time.perf_counter()
        if step.rows and self._last_read is not None:
            step.seconds = now - self._last_read
            rows = len(step.rows)
            extra = 0.0
            if self._speculation is not None:
                extra = self._speculation.extra(self._launched, rows)
                self._latency.saw_guesses(extra)
            if tokens := max(self._chunks):
                self._latency.saw_gap(rows, tokens, step.seconds - extra)
            elif self._speculation is not None and self._launched > rows:
                self._speculation.saw_step(self._launched, step.seconds)
            else:
                self._latency.saw_step(rows, step.seconds)
        self._last_read = now if step.rows else None

    def _prefill(self, step: Step) -> None:
        planned = self._scheduler.next_chunk(self._lengths())
        step.prefilled += [_progress(job) for job in self._begun]
        self._begun.clear()
        self._chunks.append(len(planned[0]) * planned[1] if planned else 0)
        if planned is None:
            return
        jobs, count = planned
        job = jobs[-1]
        begin = time.perf_counter()
        self._recorder.working([j.request.id for j in jobs], PATIENCE)
        try:
            # Beside running rows chunks are short, and are launched without waiting for them.
            forward = whole if self._batch else self._forward
            if len(jobs) > 1:
                run_together(self._model, jobs, count, forward)
            else:
                job.run(self._model, count, forward)
            if not self._batch:
                # Nobody waits for tokens: wait for a chunk, so that an abort is heard after it.
                # The one before, if it was another prompt's, so that the device is never idle.
                (job if self._last_job is job else self._last_job or job).wait()
                self._latency.saw_chunk(count * len(jobs), time.perf_counter() - begin)
            self._last_job = None if self._batch else job
        except Exception as error:  # whatever a model raises fails this request alone
            log.exception("prefill of %s failed", [j.request.id for j in jobs])
            for failed in jobs:
                failed.caches = []
                self._fail(failed, "request_failed", f"The prompt could not be run: {error}")
            return
        for ran in jobs:
            if self._cache_use is not None:
                self._cache_use.ran(ran)
            step.prefilled.append(_progress(ran))
        if job.wants_logprobs and not job.left:
            step.prompt_logprobs.append(PromptLogprobs(job.request.id, job.logprobs))

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(id=id):
                self._abort(id, None)
            case AbortChoice(id=id, choice=choice):
                self._abort(id, choice)
            case CacheQuery():
                self._transport.send(self._report(message))
            case Shutdown():
                self._stopping = True

    def _submit(self, request: Submit) -> None:
        self._recorder.working([request.id], PATIENCE)
        try:
            jobs = jobs_of(request, time.monotonic(), self._grammars, self._groupable)
        except Exception as error:  # a parameter that cannot be prepared fails its own request
            log.exception("request %s cannot be prepared", request.id)
            self._transport.send(Failed("invalid_request", str(error), request.id))
            return
        needed = self._budget.row(max(job.length for job in jobs) + 1)
        if needed > self._budget.limit:
            text = (
                f"The prompt needs {needed >> 20} MiB of key-value memory and the budget is "
                f"{self._budget.limit >> 20} MiB. Shorten it, or raise --kv-memory."
            )
            self._transport.send(Failed("invalid_request", text, request.id))
            return
        for job in jobs:
            self._queue(job)

    def _report(self, query: CacheQuery) -> CacheReport:
        if self._cache_use is None:
            return CacheReport(query.id, False, TierReport(0), None, {})
        if query.clear:
            self._cache_use.cache.clear()
        return self._cache_use.cache.report(query.id)

    def _stop(self, row: Row, problem: str) -> None:
        self._abort(row.request.id, None)
        self._transport.send(Failed("request_failed", problem, row.request.id))

    def _fail(self, job: Job, code: str, text: str) -> None:
        self._abort(job.request.id, None)
        self._transport.send(Failed(code, text, job.request.id))

    def _abort(self, id: int, choice: int | None) -> None:
        for row in self._batch.rows:
            if row.request.id == id and choice in (None, row.choice):
                row.gone = True
        for job in [j for j in self._scheduler.tasks() if j.request.id == id]:
            job.rows = [r for r in job.rows if choice not in (None, r.choice)]
            if not job.rows:
                self._scheduler.discard(job)
                if self._cache_use is not None:
                    self._cache_use.dropped(job)


def _progress(job: Job) -> Prefilled:
    prompt = len(job.request.prompt)
    cached, written = min(prompt, job.cached), min(prompt, job.written)
    return Prefilled(job.request.id, job.done, job.length, cached, job.hit, written)
