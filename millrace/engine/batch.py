"""The batch: rows that decode together, their last tokens, and the draws that nobody has read yet.

A step is a forward pass on every row's last token and a draw from its logits. Between the two, or after
them, the tokens drawn before are read: how, is written once, for steps with guesses and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from millrace.engine.row import Ahead, Row
from millrace.engine.runner import Runner
from millrace.engine.sampler import Draw, Sampler
from millrace.protocol import TokenLogprob


class Drawn(NamedTuple):
    """What a row has drawn in a step."""

    row: Row
    tokens: list[int]
    guessed: int
    logprob: TokenLogprob | None
    """Of the first token, for rows that ask: those guess nothing."""


@dataclass
class Pending:
    """Draws on the device, with the rows they belong to; stays good when rows join or leave."""

    rows: list[Row]
    guesses: list[list[int]]
    """What was run beside each row's last token; empty if nothing was."""
    draw: Draw | None
    alone: list[tuple[Draw | None, str]] = field(default_factory=list)
    """Row by row, where they could not be drawn as one, with what went wrong."""


class Batch:
    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self.rows: list[Row] = []
        self._last: mx.array | None = None
        """Each row's last token, not yet run; on the device, perhaps still being computed."""
        self._logits: mx.array | None = None
        self._guesses: list[list[int]] = []
        self._pending: list[Pending] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def logits(self) -> mx.array | None:
        """What the last step gave, until tokens have been drawn from it."""
        return self._logits

    def join(self, job: int, rows: Sequence[Row], tokens: Sequence[int], delta: int = 0) -> None:
        """Add rows that share a prompt's state; the last of its tokens has not been run."""
        self._runner.join(job, len(rows), len(tokens) - 1, rows[0].request.adapter, delta)
        self.rows += rows
        joined = mx.array([tokens[-1]] * len(rows), mx.int32)
        self._last = joined if self._last is None else mx.concatenate([self._last, joined])
        self._sampler.changed()

    def drop(self, gone: set[int]) -> None:
        """Remove rows by place. The last rows move into the holes, so that few rows are copied."""
        keep = len(self.rows) - len(gone)
        order = list(range(keep))
        movers = iter([i for i in range(keep, len(self.rows)) if i not in gone])
        for hole in (i for i in range(keep) if i in gone):
            order[hole] = next(movers)
        self._runner.keep_rows(order)
        self.rows = [self.rows[i] for i in order]
        assert self._last is not None
        self._last = self._last[mx.array(order, mx.int32)] if order else None
        self._sampler.changed()

    def reset(self) -> None:
        """After a fault: nothing in flight can be trusted."""
        self._runner.empty()
        self.rows, self._last, self._logits = [], None, None
        self._guesses, self._pending = [], []
        self._sampler.changed()

    def forward(self, guesses: Sequence[list[int]]) -> None:
        """Launch the model on every row's last token, and on what is guessed to follow it."""
        assert self._last is not None
        ahead = max(map(len, guesses), default=0)
        inputs = self._last[:, None]
        if ahead:
            padded = [[*g, *[0] * (ahead - len(g))] for g in guesses]
            inputs = mx.concatenate([inputs, mx.array(padded, mx.int32)], axis=1)
        logits = self._runner.step(inputs)
        if ahead:
            places = [(i, k) for i, g in enumerate(guesses) for k in range(len(g) + 1)]
            row, place = (mx.array(part, mx.int32) for part in zip(*places, strict=True))
            self._logits = logits[row, place]
        else:
            self._logits = logits[:, -1, :]
        self._guesses = [list(g) for g in guesses] if ahead else []
        mx.async_eval(self._logits)

    def sample(self) -> None:
        """Launch the draw of every row's next token, or of one more than it has guesses."""
        logits, self._logits = self._logits, None
        assert logits is not None
        pending = Pending(list(self.rows), self._guesses, None)
        try:
            if self._guesses:
                wide: list[Row | Ahead] = []
                for row, guess in zip(self.rows, self._guesses, strict=True):
                    wide += [row, *(Ahead(row, k + 1) for k in range(len(guess)))]
                pending.draw = self._sampler.draw_ahead(logits[...], wide)
            else:
                # A handle of its own: a draw that fails half-way has changed what it was given.
                pending.draw = self._sampler.draw(logits[...], self.rows)
            mx.async_eval(pending.draw.arrays())
        except Exception:  # one row's parameters, most likely: it shows which when they draw alone
            self._sample_alone(logits, pending)
        if not self._guesses:
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
        """Every row draws by itself, without its guesses; whose draw fails is known then."""
        pending.draw = None
        at = 0
        for i, row in enumerate(self.rows):
            width = len(self._guesses[i]) + 1 if self._guesses else 1
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
            if pending.guesses:
                # Read before anything else is launched: the rows are those of the batch.
                self._runner.advance([len(d.tokens) for d in found])
                self._last = mx.array([d.tokens[-1] for d in found], mx.int32)
            drawn += found
        self._pending = []
        return drawn

    def _read(self, pending: Pending) -> list[Drawn]:
        if pending.draw is None:
            return [_alone(row, *one) for row, one in zip(pending.rows, pending.alone, strict=True)]
        tokens: list[int] = pending.draw.tokens.tolist()
        scores = pending.draw.scores()
        found: list[Drawn] = []
        at = 0
        for i, row in enumerate(pending.rows):
            guess = pending.guesses[i] if pending.guesses else []
            mine = tokens[at : at + len(guess) + 1]
            right = 0
            while right < len(guess) and guess[right] == mine[right]:
                right += 1
            found.append(Drawn(row, mine[: right + 1], len(guess), scores.get(at)))
            at += len(guess) + 1
        return found


def _alone(row: Row, draw: Draw | None, problem: str) -> Drawn:
    if draw is None:
        row.problem = row.problem or problem
        return Drawn(row, [0], 0, None)
    return Drawn(row, [int(draw.tokens.item())], 0, draw.scores().get(0))
