"""The batch: sequences that are being answered, their last tokens, and draws that are not read yet.

A step is one pass over every row's last token, its draft tokens and the prompts beside them, and a draw
from the rows' logits. Between the two, or after them, the tokens drawn before are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from millrace.engine.ahead import Ahead, ahead_of
from millrace.engine.row import Row
from millrace.engine.runner import Runner, SequenceRun
from millrace.engine.sampler import Draw, Sampler
from millrace.protocol import TokenLogprob


class Drawn(NamedTuple):
    """What a row has drawn in a step."""

    row: Row
    tokens: list[int]
    drafted: int
    logprob: TokenLogprob | None
    """Of the first token, for rows that ask: those have no draft tokens."""


@dataclass
class Pending:
    """Draws on the device, with the rows they belong to; stays good when rows join or leave."""

    rows: list[Row]
    drafts: list[list[int]]
    """What was run behind each row's last token; empty if nothing was."""
    draw: Draw | None
    ahead: list[list[Ahead]] = field(default_factory=list)
    """The rows behind each of their draft tokens."""
    alone: list[tuple[Draw | None, str]] = field(default_factory=list)
    """Row by row, where they could not be drawn as one, with what went wrong."""


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt in a pass."""

    number: int
    """Of its sequence."""
    tokens: Sequence[int]


class Batch:
    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self.rows: list[Row] = []
        self._last: mx.array | None = None
        """Each row's last token, not yet run; on the device, perhaps still being computed."""
        self._logits: mx.array | None = None
        self._drafts: list[list[int]] = []
        self._pending: list[Pending] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def logits(self) -> mx.array | None:
        """What the last pass gave, until tokens have been drawn from it."""
        return self._logits

    def join(self, number: int, rows: Sequence[Row], tokens: Sequence[int], shift: int = 0) -> None:
        """Add rows that share a prompt's state; the last of its tokens has not been run."""
        self._runner.fork(number, [row.number for row in rows], shift)
        for row in rows:
            self._runner.set_adapter(row.number, row.request.adapter)
        self.rows += rows
        joined = mx.array([tokens[-1]] * len(rows), mx.int32)
        self._last = joined if self._last is None else mx.concatenate([self._last, joined])
        self._sampler.changed()

    def drop(self, gone: set[int]) -> None:
        """Remove rows by place."""
        for place in gone:
            self._runner.drop(self.rows[place].number)
        kept = [i for i in range(len(self.rows)) if i not in gone]
        self.rows = [self.rows[i] for i in kept]
        assert self._last is not None
        self._last = self._last[mx.array(kept, mx.int32)] if kept else None
        self._sampler.changed()

    def reset(self) -> None:
        """After a fault: nothing in flight can be trusted."""
        for row in self.rows:
            self._runner.drop(row.number)
        self.rows, self._last, self._logits = [], None, None
        self._drafts, self._pending = [], []
        self._sampler.changed()

    def forward(self, drafts: Sequence[list[int]], prompts: Sequence[PrefillChunk] = ()) -> None:
        """Launch the model on every row's last token and its draft tokens, and on prompts beside them."""
        assert self._last is not None
        drafted = list(map(list, drafts)) if any(drafts) else [[] for _ in self.rows]
        ahead = any(drafted)
        tokens = self._last
        if ahead:
            rows = zip(self._last.tolist(), drafted, strict=True)
            tokens = mx.array([t for last, draft in rows for t in (last, *draft)], mx.int32)
        count = tokens.shape[0]
        runs = [
            SequenceRun(row.number, 1 + len(draft), len(draft))
            for row, draft in zip(self.rows, drafted, strict=True)
        ]
        if prompts:
            runs += [SequenceRun(p.number, len(p.tokens)) for p in prompts]
            more = mx.array([t for p in prompts for t in p.tokens], mx.int32)
            tokens = mx.concatenate([tokens, more])
        if self._runner.single:
            logits = self._one_by_one(tokens, runs)
        else:
            found = self._runner.run(tokens, runs, range(count))
            assert found is not None
            logits = found
        self._logits = logits
        self._drafts = drafted if ahead else []
        mx.async_eval(self._logits)

    def _one_by_one(self, tokens: mx.array, runs: Sequence[SequenceRun]) -> mx.array:
        found = [self._runner.run(tokens[i : i + 1], [run], [0]) for i, run in enumerate(runs)]
        return mx.concatenate([each for each in found if each is not None])

    def sample(self) -> None:
        """Launch the draw of every row's next token, or of one more than it has draft tokens."""
        logits, self._logits = self._logits, None
        assert logits is not None
        pending = Pending(list(self.rows), self._drafts, None)
        try:
            if self._drafts:
                wide: list[Row | Ahead] = []
                both = zip(self.rows, self._drafts, strict=True)
                pending.ahead = [ahead_of(row, draft) for row, draft in both]
                for row, ahead in zip(self.rows, pending.ahead, strict=True):
                    wide += [row, *ahead]
                pending.draw = self._sampler.draw_ahead(logits[...], wide)
            else:
                # A handle of its own: a draw that fails half-way has changed what it was given.
                pending.draw = self._sampler.draw(logits[...], self.rows)
            mx.async_eval(pending.draw.arrays())
        except Exception:  # one row's parameters, most likely: it shows which when they draw alone
            self._sample_alone(logits, pending)
        if not self._drafts:
            assert pending.draw is not None or pending.alone
            self._last = (
                pending.draw.tokens
                if pending.draw is not None
                else mx.concatenate(
                    [d.tokens if d else mx.zeros((1,), mx.int32) for d, _ in pending.alone]
                )
            )
        self._pending.append(pending)

    def _sample_alone(self, logits: mx.array, pending: Pending) -> None:
        """Every row draws by itself, without its draft tokens; whose draw fails is known then."""
        pending.draw = None
        at = 0
        for i, row in enumerate(self.rows):
            width = len(self._drafts[i]) + 1 if self._drafts else 1
            try:
                draw = self._sampler.draw_ahead(logits[at : at + 1], [row])
                mx.eval(draw.arrays())
                pending.alone.append((draw, ""))
            except Exception as error:
                pending.alone.append((None, f"Its next token could not be drawn: {error}"))
            at += width

    def read(self) -> list[Drawn]:
        """Wait for the draws that have not been read: the tokens that hold, row by row."""
        drawn: list[Drawn] = []
        for pending in self._pending:
            found = list(self._read(pending))
            if pending.drafts:
                # Read before anything else is launched: the rows are those of the batch.
                self._accept(pending, [len(d.tokens) for d in found])
                self._last = mx.array([d.tokens[-1] for d in found], mx.int32)
            drawn += found
        self._pending = []
        return drawn

    def _accept(self, pending: Pending, counts: Sequence[int]) -> None:
        """Of what each row ran, this many tokens count."""
        for row, draft, count in zip(pending.rows, pending.drafts, counts, strict=True):
            wrong = len(draft) + 1 - count
            if wrong:
                self._runner.cut(row.number, self._runner.length(row.number) - wrong)

    def _read(self, pending: Pending) -> list[Drawn]:
        if pending.draw is None:
            return [_alone(row, *one) for row, one in zip(pending.rows, pending.alone, strict=True)]
        tokens: list[int] = pending.draw.tokens.tolist()
        scores = pending.draw.scores()
        found: list[Drawn] = []
        at = 0
        for i, row in enumerate(pending.rows):
            draft = pending.drafts[i] if pending.drafts else []
            mine = tokens[at : at + len(draft) + 1]
            right = 0
            while right < len(draft) and draft[right] == mine[right]:
                if not pending.ahead[i][right].sound:
                    break
                right += 1
            found.append(Drawn(row, mine[: right + 1], len(draft), scores.get(at)))
            at += len(draft) + 1
        return found


def _alone(row: Row, draw: Draw | None, problem: str) -> Drawn:
    if draw is None:
        row.problem = row.problem or problem
        return Drawn(row, [0], 0, None)
    return Drawn(row, [int(draw.tokens.item())], 0, draw.scores().get(0))
