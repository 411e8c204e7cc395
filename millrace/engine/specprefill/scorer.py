"""The draft at work: it runs a prompt, goes on by some tokens, and says what stays of the prompt.

Part of the executor: it is told what to do, and decides nothing. One prompt's state is held at a time for
each prefill that was begun and has not ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from millrace.cache.operations import Keep, KeepState, Restore
from millrace.engine.row import Row
from millrace.engine.runner import Runner, SequenceRun
from millrace.engine.specprefill.operations import (
    BeginScoring,
    ChooseTokens,
    DraftCache,
    EndScoring,
    LookAhead,
    ScoreChunk,
    ScoringOperation,
    ScoringResult,
)
from millrace.engine.specprefill.scores import importance
from millrace.engine.specprefill.selection import select
from millrace.protocol import Submit

if TYPE_CHECKING:
    from millrace.cache.store import SegmentStore


@dataclass
class _Scoring:
    request: Submit
    done: int = 0
    token: mx.array | None = None
    """The last that the draft has drawn and not run."""
    steps: int = 0
    scores: mx.array | None = None
    """Summed over the steps."""


class Scorer:
    def __init__(self, runner: Runner, store: SegmentStore | None) -> None:
        self._runner = runner
        self._store = store
        self._scorings: dict[int, _Scoring] = {}

    @property
    def nbytes(self) -> int:
        """State that is held for prompts at hand."""
        return self._runner.nbytes

    def carry_out(
        self,
        operation: ScoringOperation,
        rows: Mapping[int, Row],
        working: Callable[[list[int]], None],
    ) -> list[ScoringResult]:
        """What came of it, if it is more than books. `working` is told whose work begins."""
        match operation:
            case DraftCache():
                self._cache(operation)
                return []
            case EndScoring(prefill=prefill):
                self._end(prefill)
                return []
            case BeginScoring(prefill=prefill, row=number):
                if row := rows.get(number):
                    self._scorings[prefill] = _Scoring(row.request)
                    self._runner.begin(prefill)
                return []
        scoring = self._scorings.get(operation.prefill)
        if scoring is None:
            return []  # its request could not be admitted, which is heard with the turn's outcome
        working([scoring.request.id])
        begin = time.perf_counter()
        result = ScoringResult(operation.prefill)
        waited = self._runner.immediate
        try:
            match operation:
                case ScoreChunk(wait=wait):
                    self._chunk(operation, scoring)
                    waited |= wait
                case LookAhead(wait=wait):
                    self._look_ahead(operation, scoring)
                    waited |= wait
                case ChooseTokens():
                    result.kept = self._choose(operation, scoring)
        except Exception as error:  # whatever a model raises is this request's alone
            self._end(operation.prefill)
            result.problem = str(error) or repr(error)
        if waited:
            result.seconds = time.perf_counter() - begin
        return [result]

    def _end(self, prefill: int) -> None:
        self._scorings.pop(prefill, None)
        self._runner.drop(prefill)

    def _chunk(self, chunk: ScoreChunk, scoring: _Scoring) -> None:
        tokens = scoring.request.prompt[scoring.done : scoring.done + chunk.count]
        run = SequenceRun(chunk.prefill, len(tokens))
        self._runner.run(mx.array(tokens, mx.int32), [run], [])
        scoring.done += len(tokens)
        if chunk.wait:
            self._runner.wait()

    def _look_ahead(self, ahead: LookAhead, scoring: _Scoring) -> None:
        prompt = scoring.request.prompt
        for _ in range(ahead.steps):
            if scoring.token is None:
                scoring.token = mx.array([prompt[-1]], mx.int32)
            logits, queries = self._runner.peek(ahead.prefill, scoring.token)
            asked = [
                (found, self._runner.keys(ahead.prefill, layer, len(prompt)))
                for layer, found in enumerate(queries)
                if found is not None
            ]
            scores = importance(asked)
            scoring.scores = scores if scoring.scores is None else scoring.scores + scores
            scoring.token = mx.argmax(logits, axis=-1).astype(mx.int32)
            scoring.steps += 1
            if self._runner.immediate:
                # The model writes where these keys lie.
                mx.eval(scoring.scores)
            else:
                mx.async_eval(scoring.scores, scoring.token)
        if ahead.wait:
            mx.eval(scoring.scores)

    def _choose(self, choose: ChooseTokens, scoring: _Scoring) -> list[tuple[int, int]]:
        request = scoring.request
        assert scoring.scores is not None and request.sparse is not None
        scores = np.array(scoring.scores) / scoring.steps
        length = len(request.prompt)
        kept = select(scores, request.sparse, length, choose.known, choose.window)
        return list(kept.ranges)

    def _cache(self, wrapped: DraftCache) -> None:
        assert self._store is not None
        operation = wrapped.operation
        if isinstance(operation, Restore):
            state = self._store.execute(operation)
            assert state is not None
            if scoring := self._scorings.get(operation.prefill):
                self._runner.adopt(operation.prefill, state, operation.at)
                scoring.done = operation.at
        elif isinstance(operation, Keep | KeepState):
            self._store.execute(operation, self._runner.state_of(operation.source.number))
        else:
            self._store.execute(operation)
