"""A world for the decider: an executor without a model, whose passes take known times.

What the decider wants done is done in books only, strictly: a turn that joins a prompt which has not run,
drops a row that is not there, plans a pass that breaks the promise or takes more memory than there is fails
the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.engine.decider import Decider, DeciderSettings
from millrace.engine.memory import Budget, StateCost
from millrace.engine.pacing import LEAST
from millrace.engine.turn import (
    Admit,
    Begin,
    Drop,
    Finish,
    Forget,
    Join,
    Outcome,
    Pass,
    PromptRun,
    Read,
    Release,
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
    held: int = 0
    ended: bool = False

    def next_token(self, ahead: int) -> int:
        """Text that repeats itself for a while, so that some draft tokens hold."""
        place = len(self.tokens) + ahead
        return 1 + (place % 3 + self.choice + (place // 11) % 2) % 4


@dataclass
class SimPrompt:
    rows: list[SimRow]
    length: int
    done: int = 0


class World:
    """A device on which a pass takes `base + a · sequences + b · tokens` seconds: by default a step of one
    row 0.1 s and a prompt token 5 ms."""

    def __init__(
        self,
        *,
        rows: int = 4,
        limit: int = PLENTY,
        chunk: int = 512,
        max_stall: float = 0.5,
        pipelined: bool = False,
        flat: bool = True,
        speculate: int = 0,
        base: float = 0.095,
        sequence: float = 0.0,
        token: float = 0.005,
        per_token: int = 1,
        page: int = 1,
        poison: Callable[[Submit], bool] = lambda request: False,
        poisoned_prompt: Callable[[Submit], bool] = lambda request: False,
    ) -> None:
        """A pass with a poisoned request among its rows fails, and that of a poisoned prompt."""
        self.base, self.sequence, self.token = base, sequence, token
        self.now = self._done = 0.0
        """The host's clock, and when the device will have done what it was given."""
        self.budget = Budget(StateCost(per_token=per_token, page=page), limit)
        settings = DeciderSettings(
            max_running=rows,
            chunk=chunk,
            max_stall=max_stall,
            pipelined=pipelined,
            flat=flat,
            speculate=speculate,
        )
        self.settings = settings
        self.decider = Decider(settings, self.budget)
        self._poison = poison
        self._poisoned_prompt = poisoned_prompt
        self._inbox: list[ToEngine] = []
        self._outcome = Outcome()
        self._rows: dict[int, SimRow] = {}
        self._prompts: dict[int, SimPrompt] = {}
        self.batch: list[SimRow] = []
        self._drafts: dict[int, list[int]] = {}
        self._pending: list[tuple[SimRow, list[int]]] | None = None
        self._drawn_at = 0.0
        self._last_read: float | None = None
        self.first: list[int] = []
        """Requests in the order of their first token."""
        self.finished: list[tuple[int, int]] = []
        self.failed: dict[int, Failed] = {}
        self.texts: dict[tuple[int, int], list[int]] = {}
        self.gaps: list[float] = []
        self.passes: list[tuple[int, list[int]]] = []
        """How many rows ran in each pass, and how many tokens of each prompt."""

    def put(self, *messages: ToEngine) -> None:
        self._inbox += messages

    def submit(
        self,
        id: int,
        size: int,
        output: int = 5,
        *,
        width: int = 1,
        priority: int = 0,
        caller: str = "",
    ) -> None:
        """A prompt of so many tokens to run, beside the last."""
        prompt = [(id * 7919 + k) % 30_000 for k in range(size + 1)]
        choices = [Choice(k, k) for k in range(width)]
        self.put(Submit(id, prompt, choices, output, Sampling(), priority=priority, caller=caller))

    @property
    def held(self) -> int:
        """Bytes of state that rows and prompts have."""
        rows = [row.held for row in self.batch]
        return self.budget.total([*rows, *(p.done for p in self._prompts.values())])

    def turn(self) -> Turn:
        messages, self._inbox = self._inbox, []
        turn = self.decider.decide(Seen(self.now, messages, self._outcome))
        self.failed |= {f.id: f for f in turn.refused if f.id is not None}
        self._outcome = Outcome()
        before = self.now
        self._keeps_the_promise(turn)
        for operation in turn.operations:
            self._carry_out(operation)
            assert self.held <= self.budget.limit, "more memory than there is"
        if not self._outcome.rows:
            self._last_read = None
        if self.now == before and not self.batch:
            self.now += 0.01
        assert self.held <= self.decider.held <= self.budget.limit, "more than is counted"
        return turn

    def _keeps_the_promise(self, turn: Turn) -> None:
        for each in (o for o in turn.operations if isinstance(o, Pass)):
            count = sum(run.count for run in each.prompts)
            free = not each.rows or 0 < count <= LEAST or not (count or each.drafts)
            if not free and turn.expected is not None:
                assert turn.expected <= self.settings.max_stall + 1e-9, "the promise is broken"

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
            case Begin(prefill=prefill, rows=numbers):
                rows = [self._rows[n] for n in numbers]
                length = len(rows[0].request.prompt) + len(rows[0].tokens)
                self._prompts[prefill] = SimPrompt(rows, length)
            case Pass():
                self._pass(operation)
            case Release(prefill=prefill):
                del self._prompts[prefill]
            case Join(prefill=prefill, rows=numbers):
                prompt = self._prompts.pop(prefill)
                assert prompt.done == prompt.length - 1
                joined = [self._rows[n] for n in numbers]
                for row in joined:
                    row.held = prompt.done
                self.batch += joined
                assert len(self.batch) <= self.settings.max_running
            case Drop(rows=numbers):
                assert set(numbers) <= {r.number for r in self.batch}
                self.batch = [r for r in self.batch if r.number not in numbers]
            case Sample():
                if self._outcome.step_fault is None:
                    assert self._pending is None
                    drafts = self._drafts
                    self._pending = [(r, drafts.get(r.number, [])) for r in self.batch]
                    self._drawn_at = self._done
            case Read():
                self._read()
            case Finish(row=number):
                self._end(self._rows[number])
            case Forget(rows=numbers):
                for number in numbers:
                    if number in self._rows:
                        self._rows.pop(number).ended = True
            case _:
                raise AssertionError(operation)

    def _pass(self, operation: Pass) -> None:
        """What fails is run again apart, and takes its time again."""
        rows, prompts = operation.rows, operation.prompts
        assert rows or prompts, "an empty pass"
        assert bool(self.batch) == rows, "rows are left out"
        assert rows or operation.wait
        assert len({run.prefill for run in prompts}) == len(prompts)
        drafted = sum(map(len, operation.drafts.values()))
        tokens = len(self.batch) + drafted + sum(run.count for run in prompts)
        counts = [run.count for run in prompts]
        assert not prompts or tokens <= self.settings.chunk or sum(counts) <= LEAST
        self.passes.append((len(self.batch), counts))
        took = self.base + self.sequence * len(self.batch) + self.token * tokens
        self._done = max(self._done, self.now) + took
        for run in prompts:
            self._prefill(run)
        self._drafts = operation.drafts
        assert set(operation.drafts) <= {r.number for r in self.batch}
        for row in self.batch:
            row.held += 1 + len(operation.drafts.get(row.number, ()))
        assert self.held <= self.budget.limit, "more memory than there is"
        if any(self._poison(r.request) for r in self.batch):
            self._outcome.step_fault = "poisoned"
            self.batch, self._pending, self._last_read = [], None, None
        if operation.wait:
            self._outcome.pass_seconds = self._done - self.now
            self.now = self._done

    def _prefill(self, run: PromptRun) -> None:
        prompt = self._prompts[run.prefill]
        if self._poisoned_prompt(prompt.rows[0].request):
            self._outcome.prompt_faults[run.prefill] = "poisoned"
            del self._prompts[run.prefill]
            return
        assert run.count > 0
        prompt.done += run.count
        assert prompt.done <= prompt.length - 1

    def _read(self) -> None:
        if self._outcome.step_fault is not None:
            return
        pending, drawn_at, self._pending = self._pending, self._drawn_at, None
        assert pending is not None, "nothing was drawn"
        self.now = max(self.now, drawn_at)
        for row, draft in pending:
            if not row.ended:
                self._take(row, draft)
        if self._outcome.rows and self._last_read is not None:
            self._outcome.gap = self.now - self._last_read
            self.gaps.append(self._outcome.gap)
        self._last_read = self.now if self._outcome.rows else None

    def _take(self, row: SimRow, draft: list[int]) -> None:
        if not row.tokens and row.request.id not in self.first:
            self.first.append(row.request.id)
        drawn = [row.next_token(0)]
        while len(drawn) <= len(draft) and draft[len(drawn) - 1] == drawn[-1]:
            drawn.append(row.next_token(len(drawn)))
        row.held -= len(draft) + 1 - len(drawn)
        kept = drawn[: row.request.max_tokens - len(row.tokens)]
        row.tokens += kept
        over = len(row.tokens) >= row.request.max_tokens
        if over:
            self._end(row)
        result = RowResult(row.number, kept, len(drawn), len(draft), "length" if over else None)
        self._outcome.rows.append(result)

    def _end(self, row: SimRow) -> None:
        row.ended = True
        del self._rows[row.number]
        self.finished.append((row.request.id, row.choice))
        self.texts[row.request.id, row.choice] = row.tokens
