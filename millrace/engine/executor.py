"""Carries out turns: with the runner below it, the only code that touches arrays.

It decides nothing. No clock, random number or memory reading in it changes what happens: the same turns
give the same tokens. What fails is put down to the row or the prompt that failed, and reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from millrace.cache.operations import Keep, KeepState, Restore, Source
from millrace.engine.adapters import Adapters
from millrace.engine.batch import Batch, Drawn
from millrace.engine.grammar import Grammars
from millrace.engine.logprobs import Logprobs
from millrace.engine.memory import Rectangle
from millrace.engine.prompt import Prompt
from millrace.engine.row import Row
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.engine.sights import Sights
from millrace.engine.specprefill.operations import ScoringOperation
from millrace.engine.specprefill.scorer import Scorer
from millrace.engine.specprefill.selection import Kept
from millrace.engine.turn import (
    Admit,
    Begin,
    Chunk,
    Drop,
    DropPictures,
    EncodePicture,
    Finish,
    Forget,
    Forward,
    Join,
    Outcome,
    PlaceAdapter,
    Read,
    Release,
    RemoveAdapter,
    Reserve,
    RowResult,
    Sample,
    Turn,
    TurnOperation,
)
from millrace.flight import FlightRecorder, NullRecorder
from millrace.protocol import (
    Choice,
    Failed,
    FinishReason,
    PromptLogprobs,
    RowTokens,
    Step,
    Submit,
)

if TYPE_CHECKING:
    from millrace.cache.store import SegmentStore, StateSource

log = logging.getLogger("millrace.engine")

PATIENCE = 10.0
"""Seconds that any turn may take before the front believes that it never ends."""
UNKNOWN = 600.0
"""The same for one that is like none before: it may compile, and a machine may be slow."""


class Executor:
    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        adapters: Adapters,
        sights: Sights,
        grammars: Grammars | None = None,
        store: SegmentStore | None = None,
        recorder: FlightRecorder | None = None,
        vocabulary: int | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        """`recorder` is told whose work is at hand, before it is begun. Tokens beyond the
        `vocabulary` index no memory: the front refuses them, and so does this. `scorer` is the draft."""
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._store = store
        self._recorder = recorder or NullRecorder()
        self._patience = 0.0
        self._vocabulary = vocabulary
        self._adapters = adapters
        self._sights = sights
        self._scorer = scorer
        self._batch = self._make_batch()
        self._rows: dict[int, Row] = {}
        self._prompts: dict[int, Prompt] = {}
        self._outcome = Outcome()
        self._report: Callable[[Step], None] = lambda step: None
        self._last_read: float | None = None
        self._launched: list[int] = []
        self._later: list[int] = []
        """Requests whose chunks were launched and have not been waited for, before the last draw
        and since."""
        self._last_chunk: int | None = None
        """The prompt whose chunk may still be running on the device, while no row is."""

    def _make_batch(self) -> Batch:
        return Batch(self._runner, self._sampler)

    @property
    def nbytes(self) -> int:
        """Key-value state that is held."""
        return self._runner.nbytes

    def state(self) -> object:
        """All that is held, as plain values, to be compared with another rank's."""
        return (
            [row.number for row in self._batch.rows],
            sorted((n, row.tokens) for n, row in self._rows.items()),
            sorted((n, p.done, p.width, p.tokens) for n, p in self._prompts.items()),
            self._runner.lengths,
            self._sights.state(),
            self._store.state() if self._store is not None else None,
        )

    @property
    def draft_bytes(self) -> int:
        """The same for prompts that the draft has at hand."""
        return self._scorer.nbytes if self._scorer is not None else 0

    def execute(self, turn: Turn, report: Callable[[Step], None]) -> Outcome:
        """Carry out a turn; tokens are reported as soon as they are read."""
        self._outcome, self._report = Outcome(), report
        self._patience = UNKNOWN if turn.expected is None else PATIENCE + 10 * turn.expected
        for operation in turn.operations:
            self._carry_out(operation)
        if self._runner.unsettled:
            alone = not any(isinstance(each, Chunk) for each in turn.operations)
            self._in_step(lambda: self._runner.settle(1, part=True, alone=alone))
        self._outcome.settled = not self._runner.unsettled
        if not self._outcome.rows:
            self._last_read = None
        return self._outcome

    def _carry_out(self, operation: TurnOperation) -> None:
        match operation:
            case Forward(guesses=guesses):
                self._in_step(lambda: self._forward(guesses))
            case Sample():
                self._in_step(self._batch.sample)
                self._launched, self._later = [*self._launched, *self._later], []
            case Read():
                self._in_step(self._read)
            case Chunk():
                self._chunk(operation)
            case Admit():
                self._admit(operation)
            case Begin():
                self._in_step(self._runner.give_back)
                self._begin(operation)
            case Restore(job=job):
                self._restore(operation)
            case Release(job=job):
                self._runner.release(job)
                self._prompts.pop(job, None)
            case Reserve(slots=slots, width=width):
                self._in_step(lambda: self._runner.reserve(Rectangle(slots, width)))
            case Join(job=job, rows=numbers):
                if prompt := self._prompts.pop(job, None):
                    rows = [self._rows[n] for n in numbers]
                    self._in_step(lambda: self._batch.join(job, rows, prompt.tokens, prompt.delta))
            case Drop(rows=numbers):
                gone = {i for i, row in enumerate(self._batch.rows) if row.number in numbers}
                if gone:
                    self._in_step(lambda: self._batch.drop(gone))
            case Finish(row=number, reason=reason):
                row = self._rows.pop(number)
                row.ended = True
                self._report(Step(rows=[RowTokens(row.request.id, row.choice, [], reason)]))
            case PlaceAdapter():
                self._recorder.working([], UNKNOWN)
                self._outcome.adapters.append(self._adapters.place(operation))
            case RemoveAdapter(slot=slot):
                self._outcome.adapters.append(self._adapters.remove(slot))
            case Forget(rows=numbers):
                for number in numbers:
                    if number in self._rows:
                        self._rows.pop(number).ended = True
            case EncodePicture():
                self._recorder.working(operation.requests, UNKNOWN)
                self._outcome.pictures.append(self._sights.encode(operation))
            case DropPictures(digests=digests):
                self._sights.drop(digests)
            case _ if isinstance(operation, ScoringOperation):
                assert self._scorer is not None
                done = self._scorer.carry_out(operation, self._rows, self._working)
                self._outcome.scorings += done
            case Keep(source=source) | KeepState(source=source):
                assert self._store is not None
                self._store.execute(operation, self._source(source))
            case _:
                assert self._store is not None
                self._store.execute(operation)

    def _working(self, requests: list[int]) -> None:
        """Name those whose work begins, and those whose work the device may not have done yet."""
        named = dict.fromkeys((*requests, *self._launched, *self._later))
        self._recorder.working(list(named), self._patience)

    def _in_step(self, work: Callable[[], None]) -> None:
        """Do a part of the batch's step. A fault loses the batch: its rows begin again."""
        if self._outcome.step_fault is not None:
            return
        self._working([row.request.id for row in self._batch.rows])
        try:
            work()
        except Exception as error:  # whatever a model raises: whose fault it is, is traced later
            self._step_failed(error)

    def _step_failed(self, error: Exception) -> None:
        log.exception("the batch could not be run")
        self._outcome.step_fault = str(error) or repr(error)
        self._batch.reset()
        self._rows = {n: self._again(row) for n, row in self._rows.items()}
        self._last_read = None

    def _forward(self, guesses: dict[int, list[int]]) -> None:
        self._batch.forward(
            [guesses.get(r.number, []) for r in self._batch.rows] if guesses else []
        )

    def _read(self) -> None:
        step = Step()
        for drawn in self._batch.read():
            if not drawn.row.ended:
                self._take(step, drawn)
        # The device works in order: what was launched before these were drawn is done.
        self._launched = []
        now = time.perf_counter()
        if self._outcome.rows and self._last_read is not None:
            self._outcome.gap = step.seconds = now - self._last_read
        self._last_read = now
        if step.rows:
            self._report(step)

    def _take(self, step: Step, drawn: Drawn) -> None:
        """A row has drawn tokens; those after its end do not count."""
        row = drawn.row
        kept: list[int] = []
        finish: FinishReason | None = None
        for token in drawn.tokens:
            if row.problem is not None:
                break
            kept.append(token)
            finish = row.accept(token)
            if finish is not None:
                break
        if row.problem is None:
            scores = [drawn.logprob] if drawn.logprob else []
            step.rows.append(RowTokens(row.request.id, row.choice, kept, finish, scores))
        if finish is not None or row.problem is not None:
            row.ended = True
            self._rows.pop(row.number, None)
        self._outcome.rows.append(
            RowResult(row.number, kept, len(drawn.tokens), drawn.guessed, finish, row.problem)
        )

    def _admit(self, admit: Admit) -> None:
        request = admit.request
        self._working([request.id])
        try:
            self._check(request)
            for number, choice in zip(admit.rows, request.choices, strict=True):
                self._rows[number] = Row.of(request, choice, number, self._grammars)
        except Exception as error:  # a parameter that cannot be prepared fails its own request
            log.exception("request %s cannot be prepared", request.id)
            for number in admit.rows:
                self._rows.pop(number, None)
            self._outcome.failed.append(Failed("invalid_request", str(error), request.id))

    def _check(self, request: Submit) -> None:
        self._adapters.check(request)
        self._sights.check(request)
        if self._vocabulary is None:
            return
        for tokens in (request.prompt, *(c.generated for c in request.choices)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise ValueError(f"Token ids are below {self._vocabulary}.")

    def _begin(self, begin: Begin) -> None:
        rows = [self._rows[n] for n in begin.rows if n in self._rows]
        if not rows:
            return  # it could not be admitted, which is heard with the turn's outcome
        request, prompt = rows[0].request, rows[0].request.prompt
        kept = Kept.of(begin.kept, len(prompt)) if begin.kept else None
        tokens = [*(kept.of_prompt(prompt) if kept else prompt), *rows[0].tokens]
        scored = request.prompt_logprobs if begin.scored else None
        view = self._sights.view(request, len(tokens))
        self._prompts[begin.job] = Prompt(request, tokens, begin.width, scored, view, kept)

    def _again(self, row: Row) -> Row:
        """A row as its tokens leave it, whatever was in flight for it."""
        choice = Choice(row.choice, row.seed, list(row.tokens))
        return Row.of(row.request, choice, row.number, self._grammars)

    def _restore(self, restore: Restore) -> None:
        assert self._store is not None
        caches = self._store.execute(restore)
        assert caches is not None
        if prompt := self._prompts.get(restore.job):
            prompt.done = restore.at
            self._runner.adopt(restore.job, caches, prompt.width)

    def _chunk(self, chunk: Chunk) -> None:
        prompts = {job: self._prompts[job] for job in chunk.jobs if job in self._prompts}
        if not prompts:
            return
        self._working([p.request.id for p in prompts.values()])
        begin = time.perf_counter()
        try:
            if len(prompts) > 1:
                self._together(prompts, chunk)
            else:
                self._run(*next(iter(prompts.items())), chunk)
            if chunk.wait:
                self._wait(chunk.jobs[-1])
            else:
                self._last_chunk = None
            if chunk.wait or self._runner.immediate:
                self._outcome.chunk_seconds = time.perf_counter() - begin
            self._later += [p.request.id for p in prompts.values()]
        except Exception as error:  # whatever a model raises
            self._chunk_failed(chunk, error)

    def _chunk_failed(self, chunk: Chunk, error: Exception) -> None:
        log.exception("a prompt could not be run")
        self._outcome.chunk_fault = str(error) or repr(error)
        for job in chunk.jobs:
            self._runner.release(job)
            self._prompts.pop(job, None)

    def _wait(self, job: int) -> None:
        """Wait for the chunk before, if it was another prompt's, so that the device is never idle."""
        last, self._last_chunk = self._last_chunk, job
        self._launched, self._later = [], []
        self._runner.wait(job if last in (None, job) else last)

    def _together(self, prompts: dict[int, Prompt], chunk: Chunk) -> None:
        runs = {
            job: prompt.tokens[: min(chunk.count, len(prompt.tokens) - 1)]
            for job, prompt in prompts.items()
        }
        adapters = [prompt.request.adapter for prompt in prompts.values()]
        self._runner.together(runs, chunk.length, beside=bool(self._batch), adapters=adapters)
        for job, run in runs.items():
            prompts[job].done = len(run)

    def _run(self, job: int, prompt: Prompt, chunk: Chunk) -> None:
        begin, end = prompt.done, min(prompt.done + chunk.count, len(prompt.tokens) - 1)
        if not begin:
            self._runner.begin(job, prompt.width)
        run = prompt.tokens[begin:end]
        top = prompt.scored
        sight = None
        if prompt.view is not None:
            sight = self._sights.chunk(prompt.view, begin, end, chunk.length)
        positions = None
        if prompt.kept is not None and end > prompt.kept.exact:
            positions = prompt.kept.positions(begin, end)
        logits = self._runner.chunk(
            job,
            run,
            chunk.length,
            beside=bool(self._batch),
            scored=top is not None,
            adapter=prompt.request.adapter,
            sight=sight,
            positions=positions,
        )
        prompt.done = end
        if top is not None and logits is not None:
            self._score(prompt, logits, begin, top)

    def _score(self, prompt: Prompt, logits: mx.array, begin: int, top: int) -> None:
        follow = mx.array(prompt.tokens[begin + 1 : prompt.done + 1], mx.int32)
        prompt.logprobs += Logprobs(logits[0], follow, top).read([top] * follow.size)
        if prompt.done == len(prompt.tokens) - 1:
            scores = PromptLogprobs(prompt.request.id, prompt.logprobs)
            self._report(Step(prompt_logprobs=[scores]))

    def _source(self, source: Source) -> StateSource:
        """Whose state is to be kept."""
        if source.kind == "job":
            return self._runner.prompt_state(source.number)
        place = next(i for i, r in enumerate(self._batch.rows) if r.number == source.number)
        return self._runner.row_state(place)
