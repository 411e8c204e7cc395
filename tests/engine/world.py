"""A world for the decider: an executor without a model, whose steps and chunks take known times.

What the decider wants done is done in books only, strictly: a turn that joins a prompt which has not run,
drops a row that is not there or takes more memory than there is fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.engine.decider import Decider, DeciderSettings
from millrace.engine.memory import NOTHING, Budget, Rectangle, StateCost
from millrace.engine.shapes import Shapes
from millrace.engine.turn import (
    Admit,
    Begin,
    Chunk,
    Drop,
    Finish,
    Forget,
    Forward,
    Join,
    Outcome,
    Read,
    Release,
    Reserve,
    RowResult,
    Sample,
    Seen,
    Turn,
)
from millrace.protocol import Choice, Failed, Sampling, Submit, ToEngine

PLENTY = 1 << 60


@dataclass
class SimRow:
    number: int
    request: Submit
    choice: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass
class SimPrompt:
    rows: list[SimRow]
    length: int
    done: int = 0


class World:
    """A device on which a decode step takes 0.1 s and a prompt token 5 ms."""

    STEP, TOKEN = 0.1, 0.005

    def __init__(
        self,
        *,
        rows: int = 4,
        limit: int = PLENTY,
        chunk: int = 512,
        pipelined: bool = False,
        recurring: bool = False,
        burst: float = 2.0,
        token: float = TOKEN,
        step: float = STEP,
        row: float = 0.0,
        tile: int = 1 << 30,
        base: float = 0.0,
        join: float = 0.0,
        per_token: int = 1,
        settling: int = 0,
        poison: Callable[[Submit], bool] = lambda request: False,
        poisoned_prompt: Callable[[Submit], bool] = lambda request: False,
    ) -> None:
        """What a step, each row in it, a prompt token, a chunk by itself and a row that joins take may be
        said, and how many rows a step computes at once. A step with a poisoned request in it fails, and a
        chunk with a poisoned prompt. Memory that no row needs yet is there after so many turns of
        `settling`."""
        self.token, self._base, self._join = token, base, join
        self._step, self._row, self._tile = step, row, tile
        self._settling = settling
        self._there, self._told, self._told_at = NOTHING, NOTHING, 0
        self._turns = 0
        self.now = 0.0
        self.budget = Budget(StateCost(per_token=per_token), limit)
        settings = DeciderSettings(max_running=rows, chunk=chunk, pipelined=pipelined, burst=burst)
        self.decider = Decider(settings, self.budget, Shapes(recurring))
        for count in range(1, 40):
            if not row:
                self.decider._latency.saw_step(count, step)
        for count in (10, 30):
            self.decider._latency.saw_chunk(count, base + count * token)
        self.max_rows = rows
        self._poison = poison
        self._poisoned_prompt = poisoned_prompt
        self._inbox: list[ToEngine] = []
        self._outcome = Outcome()
        self._rows: dict[int, SimRow] = {}
        self._prompts: dict[int, SimPrompt] = {}
        self.batch: list[SimRow] = []
        self._pending: list[SimRow] = []
        self._last_read: float | None = None
        self.first: list[int] = []
        """Requests in the order of their first token."""
        self.finished: list[tuple[int, int]] = []
        self.failed: dict[int, Failed] = {}
        self.gaps: list[float] = []
        self.chunks: list[tuple[int, int]] = []
        self.copied = 0
        """How often a row that joined others had all memory copied at once."""

    def put(self, *messages: ToEngine) -> None:
        self._inbox += messages

    def submit(
        self, id: int, size: int, output: int = 5, *, width: int = 1, priority: int = 0
    ) -> None:
        """A prompt of so many tokens to run, beside the last."""
        prompt = [(id * 7919 + k) % 30_000 for k in range(size + 1)]
        choices = [Choice(k, k) for k in range(width)]
        self.put(Submit(id, prompt, choices, output, Sampling(), priority=priority))

    def turn(self) -> Turn:
        messages, self._inbox = self._inbox, []
        turn = self.decider.decide(Seen(self.now, messages, self._outcome))
        self.failed |= {f.id: f for f in turn.refused if f.id is not None}
        self._outcome = Outcome()
        before = self.now
        self._turns += 1
        for operation in turn.operations:
            self._carry_out(operation)
        if not self.batch:
            self._there = self._told = NOTHING
        elif self._turns >= self._told_at + self._settling:
            self._there = self._told
        self._outcome.settled = self._there == self._told
        if self.now == before:
            self.now += 0.01
        assert self.decider.held <= self.budget.limit, "more memory than there is"
        return turn

    def run(self, limit: int = 6000) -> None:
        for _ in range(limit):
            if not self._inbox and not self.decider.busy:
                assert not self.batch and not self._prompts and not self._rows
                assert self.decider.held == 0
                return
            self.turn()
        raise AssertionError("somebody starves")

    def _carry_out(self, operation: object) -> None:
        match operation:
            case Admit(request=request, rows=numbers):
                for number, choice in zip(numbers, request.choices, strict=True):
                    self._rows[number] = SimRow(
                        number, request, choice.index, list(choice.generated)
                    )
            case Begin(job=job, rows=numbers):
                rows = [self._rows[n] for n in numbers]
                length = len(rows[0].request.prompt) + len(rows[0].tokens)
                self._prompts[job] = SimPrompt(rows, length)
            case Chunk(jobs=jobs, count=count, length=length):
                self._chunk(jobs, count, length)
            case Release(job=job):
                del self._prompts[job]
            case Reserve(slots=slots, width=width):
                assert self.budget.cost.per_token * slots * width <= self.budget.limit
                self._told, self._told_at = Rectangle(slots, width), self._turns
                if not self._told.holds(self._there.slots, self._there.width):
                    self._there = self._told
            case Join(job=job, rows=numbers):
                prompt = self._prompts.pop(job)
                assert prompt.done == prompt.length - 1
                self.batch += [self._rows[n] for n in numbers]
                self.now += self._join * len(numbers)
                assert len(self.batch) <= self.max_rows
                if not self._there.holds(len(self.batch), prompt.length):
                    self.copied += len(self.batch) > len(numbers)
                    self._there = self._told
            case Drop(rows=numbers):
                assert set(numbers) <= {r.number for r in self.batch}
                self.batch = [r for r in self.batch if r.number not in numbers]
            case Forward():
                assert self.batch
                tiles = -(-len(self.batch) // self._tile)
                self.now += self._step * tiles + self._row * len(self.batch)
                if any(self._poison(r.request) for r in self.batch):
                    self._outcome.step_fault = "poisoned"
                    self.batch, self._pending, self._last_read = [], [], None
            case Sample():
                if self._outcome.step_fault is None:
                    assert not self._pending
                    self._pending = list(self.batch)
            case Read():
                self._read()
            case Finish(row=number):
                row = self._rows.pop(number)
                row.ended = True
                self.finished.append((row.request.id, row.choice))
            case Forget(rows=numbers):
                for number in numbers:
                    if number in self._rows:
                        self._rows.pop(number).ended = True
            case _:
                raise AssertionError(operation)

    def _chunk(self, jobs: list[int], count: int, length: int) -> None:
        assert count <= length
        self.now += self._base + len(jobs) * length * self.token
        self.chunks.append((len(jobs), length))
        prompts = [self._prompts[j] for j in jobs]
        if any(self._poisoned_prompt(p.rows[0].request) for p in prompts):
            self._outcome.chunk_fault = "poisoned"
            for job in jobs:
                del self._prompts[job]
            return
        for prompt in prompts:
            assert len(jobs) == 1 or prompt.done == 0
            prompt.done = min(prompt.done + count, prompt.length - 1)

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        for row in pending:
            if row.ended:
                continue
            if not row.tokens and row.request.id not in self.first:
                self.first.append(row.request.id)
            row.tokens.append(1)
            over = len(row.tokens) >= row.request.max_tokens
            if over:
                row.ended = True
                del self._rows[row.number]
                self.finished.append((row.request.id, row.choice))
            self._outcome.rows.append(RowResult(row.number, [1], finish="length" if over else None))
        if self._outcome.rows and self._last_read is not None:
            self._outcome.gap = self.now - self._last_read
            self.gaps.append(self._outcome.gap)
        self._last_read = self.now if self._outcome.rows else None
