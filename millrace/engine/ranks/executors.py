"""Executors of a group. The first rank's is the ordinary one, but for faults: what goes wrong in the middle
of a collective cannot be undone on one rank alone, so it ends the process, and the group is started again.
A follower's takes the tokens that were drawn from the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millrace.engine.batch import Batch, Drawn, Pending
from millrace.engine.executor import Executor
from millrace.engine.grammar import Grammars
from millrace.engine.prompt import Prompt
from millrace.engine.ranks.order import PictureFeatures
from millrace.engine.ranks.picture_features import unpacked
from millrace.engine.row import Row
from millrace.engine.turn import Admit, EncodePicture, RowResult, TurnOperation
from millrace.sizes import format_bytes

MOST_SHOWN = 512 << 20
"""Bytes that a picture may become: they are sent to the others as a part of one message."""


class LeadingExecutor(Executor):
    _indivisible = True

    def _make_batch(self) -> Batch:
        return LeadingBatch(self._runner, self._sampler)

    def _score(self, prompt: Prompt, logits: mx.array, begin: int, top: int) -> None:
        mx.eval(logits)
        super()._score(prompt, logits, begin, top)

    def _step_failed(self, error: Exception) -> None:
        raise error

    def _prompt_failed(self, prefill: int, error: Exception) -> None:
        raise error

    def _admit(self, admit: Admit) -> None:
        before = len(self._outcome.failed)
        super()._admit(admit)
        if len(self._outcome.failed) > before and self._others_admit(admit):
            # They have no grammar that could be wrong: until they hear of it, all run the prompt.
            self._rows |= _plain_rows(admit, None)

    def _carry_out(self, operation: TurnOperation) -> None:
        super()._carry_out(operation)
        if isinstance(operation, EncodePicture):
            result = self._outcome.pictures[-1]
            if result.nbytes > MOST_SHOWN:
                self._vision_inputs.drop([result.digest])
                result.done = False
                most, becomes = format_bytes(MOST_SHOWN), format_bytes(result.nbytes)
                result.problem = f"it becomes {becomes}, and ranks are sent {most} at most"

    def _others_admit(self, admit: Admit) -> bool:
        try:
            self._check(admit.request)
            _plain_rows(admit, None)
        except Exception:  # the same as on every rank
            return False
        return True


def _plain_rows(admit: Admit, grammars: Grammars | None) -> dict[int, Row]:
    chosen = zip(admit.rows, admit.request.choices, strict=True)
    return {number: Row.of(admit.request, choice, number, grammars) for number, choice in chosen}


class LeadingBatch(Batch):
    def sample(self) -> None:
        # Of a collective that has lost a rank, this raises. Whoever reads the memory without it finds a sum
        # without that rank's part.
        mx.eval(self._logits)
        super().sample()


class FollowingExecutor(Executor):
    """Has no grammars: its rows are drawn for elsewhere."""

    _indivisible = True

    def _make_batch(self) -> Batch:
        return FollowingBatch(self._runner, self._sampler)

    def take(self, results: Sequence[RowResult]) -> None:
        """What the first rank has read since the last turn."""
        assert isinstance(self._batch, FollowingBatch)
        self._batch.take(results)
        for result in results:
            row = self._rows.get(result.row)
            if row is None:
                continue
            row.tokens += result.tokens
            if result.finish is not None or result.problem is not None:
                row.ended = True
                del self._rows[result.row]

    def see(self, pictures: Sequence[PictureFeatures]) -> None:
        """What the first rank's vision tower has made of pictures since the last turn."""
        for picture in pictures:
            self._vision_inputs.take(picture.digest, unpacked(picture))

    def _carry_out(self, operation: TurnOperation) -> None:
        if not isinstance(operation, EncodePicture):  # it is shown what comes of that
            super()._carry_out(operation)

    def _step_failed(self, error: Exception) -> None:
        raise error

    def _prompt_failed(self, prefill: int, error: Exception) -> None:
        raise error

    def _score(self, prompt: Prompt, logits: mx.array, begin: int, top: int) -> None:
        # Nobody reads them here, and the first rank waits for this rank's part of them.
        mx.eval(logits)


class FollowingBatch(Batch):
    """A batch whose tokens are drawn elsewhere."""

    def sample(self) -> None:
        assert self._logits is not None
        mx.eval(self._logits)
        self._logits = None
        self._pending.append(Pending(list(self.rows), self._drafts, None))

    def read(self) -> list[Drawn]:
        return []

    def take(self, results: Sequence[RowResult]) -> None:
        found = {result.row: result for result in results}
        for pending in self._pending:
            mine = [found.get(row.number) for row in pending.rows]
            if pending.drafts:
                self._accept(pending, [r.advanced if r else 1 for r in mine])
            last = [r.tokens[-1] if r and r.tokens else 0 for r in mine]
            self._last = mx.array(last, mx.int32)
        self._pending = []
