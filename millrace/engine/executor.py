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
from millrace.engine.batch import Batch, Drawn, PrefillChunk
from millrace.engine.grammar import Grammars
from millrace.engine.logprobs import Logprobs
from millrace.engine.prompt import Prompt
from millrace.engine.row import Row
from millrace.engine.runner import Runner, SequenceRun
from millrace.engine.sampler import Sampler
from millrace.engine.specprefill.operations import ScoringOperation
from millrace.engine.specprefill.scorer import Scorer
from millrace.engine.specprefill.selection import Kept
from millrace.engine.turn import (
    Admit,
    Begin,
    Drop,
    DropPictures,
    EncodePicture,
    Finish,
    Forget,
    Join,
    Outcome,
    Pass,
    PlaceAdapter,
    PromptRun,
    Read,
    Release,
    RemoveAdapter,
    RowResult,
    Sample,
    Turn,
    TurnOperation,
)
from millrace.engine.vision_inputs import VisionInputs
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
    from millrace.cache.segments import StateSource
    from millrace.cache.store import SegmentStore

log = logging.getLogger("millrace.engine")

PATIENCE = 10.0
"""Seconds that any turn may take before the front believes that it never ends."""
UNKNOWN = 600.0
"""The same for one that is like none before: it may compile, and a machine may be slow."""


class Executor:
    _indivisible = False
    """Whether a pass that failed cannot be run again in parts."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        adapters: Adapters,
        vision_inputs: VisionInputs,
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
        self._vision_inputs = vision_inputs
        self._scorer = scorer
        self._batch = self._make_batch()
        self._rows: dict[int, Row] = {}
        self._prompts: dict[int, Prompt] = {}
        self._outcome = Outcome()
        self._report: Callable[[Step], None] = lambda step: None
        self._last_read: float | None = None
        self._launched: list[int] = []
        self._later: list[int] = []
        """Requests whose prompts were launched and have not been waited for, before the last draw
        and since."""

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
            sorted((n, p.done, p.tokens) for n, p in self._prompts.items()),
            [self._runner.length(row.number) for row in self._batch.rows],
            self._vision_inputs.state(),
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
        if not self._outcome.rows:
            self._last_read = None
        return self._outcome

    def _carry_out(self, operation: TurnOperation) -> None:
        match operation:
            case Pass():
                self._pass(operation)
            case Sample():
                self._in_step(self._batch.sample)
                self._launched, self._later = [*self._launched, *self._later], []
            case Read():
                self._in_step(self._read)
            case Admit():
                self._admit(operation)
            case Begin():
                self._begin(operation)
            case Restore(prefill=prefill):
                self._restore(operation)
            case Release(prefill=prefill):
                self._runner.drop(prefill)
                self._prompts.pop(prefill, None)
            case Join(prefill=prefill, rows=numbers):
                if prompt := self._prompts.pop(prefill, None):
                    rows = [self._rows[n] for n in numbers]
                    self._in_step(
                        lambda: self._batch.join(prefill, rows, prompt.tokens, prompt.shift)
                    )
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
                self._outcome.pictures.append(self._vision_inputs.encode(operation))
            case DropPictures(digests=digests):
                self._vision_inputs.drop(digests)
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

    def _pass(self, operation: Pass) -> None:
        """Rows and plain prompts are one pass where the model can; what fails is run again apart, so that a
        fault is its own request's alone."""
        found = [
            (self._prompts[run.prefill], run)
            for run in operation.prompts
            if run.prefill in self._prompts
        ]
        begin = time.perf_counter()
        rows = operation.rows and bool(self._batch) and self._outcome.step_fault is None
        together = [(p, r) for p, r in found if self._runner.flat and not p.apart]
        together.sort(key=lambda pair: self._runner.is_long(pair[1].prefill, pair[1].count))
        several = len(together) + rows > 1
        if not (several and self._run_together(rows, operation.drafts, together)):
            if rows:
                self._in_step(lambda: self._forward(operation.drafts, []))
            for pair in together:
                self._run_prompt(*pair)
        for pair in found:
            if pair not in together:
                self._run_prompt(*pair)
        if not found:
            return
        if operation.wait:
            self._runner.wait()
            self._launched, self._later = [], []
        if operation.wait or (not rows and self._runner.immediate):
            self._outcome.pass_seconds = time.perf_counter() - begin
        self._later += [prompt.request.id for prompt, _ in found]

    def _run_together(
        self, rows: bool, drafts: dict[int, list[int]], prompts: list[tuple[Prompt, PromptRun]]
    ) -> bool:
        """Run prompts, and rows with them, as one pass; says whether that went well."""
        requests = [r.request.id for r in self._batch.rows] if rows else []
        self._working([*requests, *(prompt.request.id for prompt, _ in prompts)])
        parts = [PrefillChunk(run.prefill, prompt.next(run.count)) for prompt, run in prompts]
        numbers = [row.number for row in self._batch.rows] if rows else []
        before = {n: self._runner.length(n) for n in (*numbers, *(part.number for part in parts))}
        try:
            if rows:
                self._forward(drafts, parts)
            else:
                tokens = mx.array([t for part in parts for t in part.tokens], mx.int32)
                runs = [SequenceRun(part.number, len(part.tokens)) for part in parts]
                self._runner.run(tokens, runs, [])
        except Exception:  # whatever a model raises: whose fault it is shows when they run apart
            if self._indivisible:
                raise
            log.warning("sequences could not be run as one pass, and run apart")
            # What failed after the pass was launched has made them longer.
            for number, length in before.items():
                if self._runner.length(number) > length:
                    self._runner.cut(number, length)
            return False
        for (prompt, _), part in zip(prompts, parts, strict=True):
            prompt.done += len(part.tokens)
        return True

    def _forward(self, drafts: dict[int, list[int]], prompts: list[PrefillChunk]) -> None:
        self._batch.forward([drafts.get(r.number, []) for r in self._batch.rows], prompts)

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
            if row.problem is None:
                finish = row.accept(token)
            if row.problem is not None:
                finish = None
                break
            kept.append(token)
            if finish is not None:
                break
        if kept:
            scores = [drawn.logprob] if drawn.logprob else []
            step.rows.append(RowTokens(row.request.id, row.choice, kept, finish, scores))
        if finish is not None or row.problem is not None:
            row.ended = True
            self._rows.pop(row.number, None)
        self._outcome.rows.append(
            RowResult(row.number, kept, len(drawn.tokens), drawn.drafted, finish, row.problem)
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
        self._vision_inputs.check(request)
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
        view = self._vision_inputs.view(request, len(tokens))
        self._prompts[begin.prefill] = Prompt(request, tokens, scored, view, kept)
        self._runner.begin(begin.prefill, request.adapter)

    def _again(self, row: Row) -> Row:
        """A row as its tokens leave it, whatever was in flight for it."""
        choice = Choice(row.choice, row.seed, list(row.tokens))
        return Row.of(row.request, choice, row.number, self._grammars)

    def _restore(self, restore: Restore) -> None:
        assert self._store is not None
        state = self._store.execute(restore)
        assert state is not None
        if prompt := self._prompts.get(restore.prefill):
            self._runner.adopt(restore.prefill, state, restore.at)
            prompt.done = restore.at

    def _run_prompt(self, prompt: Prompt, run: PromptRun) -> None:
        """Run the next tokens of a prompt by itself."""
        self._working([prompt.request.id])
        try:
            tokens = prompt.next(run.count)
            begin, end = prompt.done, prompt.done + len(tokens)
            vision = None
            if prompt.view is not None:
                vision = self._vision_inputs.chunk(prompt.view, begin, end)
            positions = prompt.positions(begin, end)
            top = prompt.scored
            logits = self._runner.run(
                mx.array(tokens, mx.int32),
                [SequenceRun(run.prefill, len(tokens), positions=positions, vision=vision)],
                range(len(tokens)) if top is not None else [],
            )
            prompt.done = end
            if top is not None and logits is not None:
                self._score(prompt, logits, begin, top)
        except Exception as error:  # whatever a model raises
            self._prompt_failed(run.prefill, error)

    def _prompt_failed(self, prefill: int, error: Exception) -> None:
        log.exception("a prompt could not be run")
        self._outcome.prompt_faults[prefill] = str(error) or repr(error)
        self._runner.drop(prefill)
        self._prompts.pop(prefill, None)

    def _score(self, prompt: Prompt, logits: mx.array, begin: int, top: int) -> None:
        follow = mx.array(prompt.tokens[begin + 1 : prompt.done + 1], mx.int32)
        prompt.logprobs += Logprobs(logits, follow, top).read([top] * follow.size)
        if prompt.done == len(prompt.tokens) - 1:
            scores = PromptLogprobs(prompt.request.id, prompt.logprobs)
            self._report(Step(prompt_logprobs=[scores]))

    def _source(self, source: Source) -> StateSource:
        """Whose state is to be kept."""
        return self._runner.state_of(source.number)
