"""The sampler: one vectorised draw for rows with different parameters.

Every row's draw follows from its distribution and from numbers that (seed, index) gives. Greedy rows pay
for an argmax and nothing more, and a feature costs only the rows that use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from millrace.engine.ahead import Ahead
from millrace.engine.grammar import masked
from millrace.engine.logprobs import Logprobs
from millrace.engine.penalties import Ids, stack
from millrace.engine.row import Row
from millrace.engine.sampling import SamplingBackend
from millrace.protocol import TokenLogprob


class Draw:
    """The tokens of a step, on the device, with what some rows wanted to know about them."""

    def __init__(self, tokens: mx.array, logprobs: Logprobs | None, plan: _DrawPlan) -> None:
        self.tokens = tokens
        self.logprobs = logprobs
        self.plan = plan

    def arrays(self) -> list[mx.array]:
        return [self.tokens] + (self.logprobs.arrays() if self.logprobs else [])

    def scores(self) -> dict[int, TokenLogprob]:
        """What was asked about the tokens, by their place; waits for the device."""
        if self.logprobs is None:
            return {}
        return dict(zip(self.plan.asked, self.logprobs.read(self.plan.tops), strict=True))


class Sampler:
    def __init__(self, backend: SamplingBackend) -> None:
        self._backend = backend
        self._plan: _DrawPlan | None = None

    def changed(self) -> None:
        """The rows of the batch are not those of the last draw."""
        self._plan = None

    def draw(self, logits: mx.array, rows: Sequence[Row]) -> Draw:
        self._plan = self._plan or _DrawPlan(rows)
        return self._draw(logits, rows, self._plan)

    def draw_ahead(self, logits: mx.array, rows: Sequence[Row | Ahead]) -> Draw:
        """A draw for rows and for the same rows later on."""
        return self._draw(logits, rows, _DrawPlan(rows))

    def _draw(self, logits: mx.array, rows: Sequence[Row | Ahead], plan: _DrawPlan) -> Draw:
        asked = logits[plan.asked_index] if plan.asked else None
        logits = _penalised(logits, [(i, rows[i]) for i in plan.penalised])
        logits = masked(logits, [(i, g) for i in plan.constrained if (g := rows[i].grammar)])
        logits = _held_back(logits, [(i, rows[i]) for i in plan.penalised])
        tokens = self._backend.choose(logits, rows)
        for i in plan.thinking:
            if rows[i].forced:
                tokens[i] = rows[i].forced[0]
        logprobs = None
        if asked is not None:
            logprobs = Logprobs(asked, tokens[plan.asked_index], max(plan.tops))
        return Draw(tokens, logprobs, plan)


class _DrawPlan:
    """What a set of rows needs, worked out once per change of the batch."""

    def __init__(self, rows: Sequence[Row | Ahead]) -> None:
        self.penalised = [i for i, r in enumerate(rows) if r.penalties is not None]
        self.constrained = [i for i, r in enumerate(rows) if r.grammar is not None]
        self.thinking = [i for i, r in enumerate(rows) if r.thinking is not None]
        self.asked = [i for i, r in enumerate(rows) if r.request.logprobs is not None]
        self.tops = [rows[i].request.logprobs or 0 for i in self.asked]
        self.asked_index = mx.array(self.asked, mx.int32)


def _penalised(logits: mx.array, rows: list[tuple[int, Row | Ahead]]) -> mx.array:
    tables = [(i, r.penalties.table()) for i, r in rows if r.penalties and r.penalties.active()]
    if not tables:
        return logits
    at = mx.array([i for i, _ in tables], mx.int32)[:, None]
    ids, factor, shift = map(mx.array, stack([t for _, t in tables], logits.shape[-1]))
    old = logits[at, ids].astype(mx.float32)
    new = mx.where(old > 0, old / factor, old * factor) + shift
    logits[at, ids] = new.astype(logits.dtype)
    return logits


def _held_back(logits: mx.array, rows: list[tuple[int, Row | Ahead]]) -> mx.array:
    """The logits without stop tokens that may not come yet.

    Where nothing else may come, by the grammar say, they may: a row always has a next token.
    """
    width = logits.shape[-1]
    bans = [(i, r, r.penalties.banned(r.generated, width)) for i, r in rows if r.penalties]
    sure = [(i, ids) for i, r, ids in bans if 0 < len(ids) < width and r.grammar is None]
    if sure:
        at, ids = _rectangle(sure)
        logits[at, ids] = -mx.inf
    risky = [(i, ids) for i, r, ids in bans if len(ids) == width or (len(ids) and r.grammar)]
    if risky:
        at, ids = _rectangle(risky)
        free = logits[at[:, 0]]
        banned = free[:]
        banned[mx.arange(len(risky))[:, None], ids] = -mx.inf
        some = mx.max(banned, axis=-1, keepdims=True) > -mx.inf
        logits[at[:, 0]] = mx.where(some, banned, free)
    return logits


def _rectangle(bans: list[tuple[int, Ids]]) -> tuple[mx.array, mx.array]:
    """Rows and their tokens, as one index; a short list repeats its first token."""
    most = max(len(ids) for _, ids in bans)
    full = [np.concatenate([ids, np.repeat(ids[:1], most - len(ids))]) for _, ids in bans]
    return mx.array([i for i, _ in bans], mx.int32)[:, None], mx.array(np.stack(full))
