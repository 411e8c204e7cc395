"""What the engine does next: a pure function of what has been seen, with a memory of its own.

It sees the clock's reading, the messages, what the last turn brought and what was measured, and returns
one turn. It holds no array and asks nobody: the same readings give the same turns, so that a recorded
run can be replayed and a whole day of scheduling simulated in a test.
"""

from __future__ import annotations

import itertools
import logging
from typing import cast

import msgspec

from millrace.cache.index import PrefixIndex
from millrace.cache.residency import Operations
from millrace.engine.cache_use import CacheUse
from millrace.engine.memory import Budget
from millrace.engine.pacing import Pacing, StepSize, decode_size
from millrace.engine.pictures import Pictures
from millrace.engine.prompts import Prompts
from millrace.engine.quarantine import Quarantine
from millrace.engine.requests import RequestBook, TurnDraft
from millrace.engine.scheduler import Scheduler
from millrace.engine.sequences import Phase, Prefill, Sequence
from millrace.engine.specprefill.scorings import Scorings
from millrace.engine.speculation import Speculation
from millrace.engine.turn import (
    Drop,
    Finish,
    Join,
    Outcome,
    Pass,
    PromptRun,
    Read,
    RowResult,
    Sample,
    Seen,
    Turn,
    TurnOperation,
)
from millrace.sizes import format_bytes

log = logging.getLogger("millrace.engine")


class DeciderSettings(msgspec.Struct, frozen=True):
    """What the decider is told once."""

    max_running: int = 32
    chunk: int = 512
    """The most tokens of a pass."""
    max_stall: float = 0.5
    """Seconds that no step is planned to take longer than while sequences are being answered."""
    speculate: int = 0
    """Draft tokens of a row, at most."""
    pipelined: bool = False
    """Whether a step is launched before the tokens of the last one are read."""
    flat: bool = True
    """Whether all tokens of a step may be one pass; draft tokens need it."""
    lends: bool = False
    """Whether the prefix cache has the pages that no sequence holds: it gives them back at once."""


class Decider:
    def __init__(
        self,
        settings: DeciderSettings,
        budget: Budget,
        cache: CacheUse | None = None,
        *,
        picture_room: int = 0,
        whole_pictures: bool = False,
        scorings: Scorings | None = None,
    ) -> None:
        """`picture_room` is how many bytes the features of pictures may take; with `whole_pictures` no
        run has a part of one. `scorings` is the work of a draft, where there is one."""
        self._settings = settings
        self._budget = budget
        self._cache = cache
        self._pacing = Pacing(settings.max_stall, settings.chunk)
        numbers = itertools.count(1)
        self._scheduler = Scheduler(settings.max_running, budget, self._begin, numbers, self._pace)
        self._pictures = Pictures(picture_room, whole=whole_pictures)
        self._requests = RequestBook(
            self._scheduler, budget, cache, self._pictures, numbers, scorings
        )
        drafts = settings.speculate and settings.flat and not settings.pipelined
        self._speculation = Speculation(settings.speculate, self._pacing) if drafts else None
        self._prompts = Prompts(
            self._scheduler,
            self._requests,
            self._pacing,
            cache,
            self._pictures,
            scorings,
            flat=settings.flat,
        )
        self._drafting = False
        """The last step had draft tokens: how far its rows have come is known when it has been read."""
        self._tried: dict[int, int] = {}
        """The tokens that it ran of each row, if so."""
        self._quarantine = Quarantine()
        self._turns = itertools.count(1)
        self._draft = TurnDraft(Turn(0))
        self._running: list[Sequence] = []
        self._paced = 0, 0.0
        """What a token of a prompt takes beside what runs, and in which turn that was looked at."""
        self._drawn = False
        """There are draws that are not read yet."""
        self._launched: list[StepSize | None] = []
        """The sizes of steps that are not read yet; None for one beside which something else ran."""
        self._reading = False
        """The last turn read a step, whether or not a row still wanted its token."""
        self._alone: StepSize | None = None
        """The size of the last turn's pass, if no rows took part."""
        self.again: float | None = None
        """In how many seconds there is something to decide, even if nothing happens."""

    # What others ask

    @property
    def busy(self) -> bool:
        return bool(self._requests.sequences or self._drawn or self._prompts.running)

    @property
    def stuck(self) -> bool:
        """Whether all there is waits for the disk, or for the front's pictures."""
        idle = not (self._running or self._drawn or self._pictures.waits or self._prompts.scoring)
        return idle and self._scheduler.stuck

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def held(self) -> int:
        """Bytes of key-value state that there may be."""
        rows = [s.held + self._tried.get(s.number, 0) for s in self._running]
        return self._budget.total([*rows, *(j.length for j in self._scheduler.coming)])

    @property
    def longest(self) -> int:
        """Tokens of the longest row or prompt that holds state."""
        return max(
            [*(s.held for s in self._running), *(j.length for j in self._scheduler.coming)],
            default=0,
        )

    @property
    def pictures(self) -> Pictures:
        return self._pictures

    @property
    def draft_cached(self) -> int:
        """Bytes that the draft's own cache holds."""
        return self._prompts.draft_cached

    @property
    def cache(self) -> PrefixIndex | None:
        return self._cache.index if self._cache else None

    def closing(self, now: float) -> Operations:
        """What is still to be done when the engine ends."""
        operations: Operations = []
        if self._cache is not None:
            self._cache.index.close(operations, now)
        return operations

    def state(self) -> object:
        """All of the scheduling state as plain values, to be compared."""
        return (
            [(s.number, s.tokens, s.phase.name, s.held, s.unread, s.group) for s in self._running],
            [
                (j.number, j.stage.name, j.done, j.cached, j.hit, [s.number for s in j.sequences])
                for j in self._scheduler.prefills()
            ],
            sorted(self._requests.sequences),
        )

    # The decision

    def decide(self, seen: Seen) -> Turn:
        self._draft = draft = TurnDraft(Turn(next(self._turns)), seen.now)
        self._learn(seen.outcome)
        if self._cache is not None:
            prefills = list(self._scheduler.prefills())
            self._cache.observe(seen.disk, prefills, self._draft.out, self._draft.now)
        for message in seen.messages:
            self._requests.receive(message, draft)
        draft.turn.wanted = self._pictures.plan(self._scheduler.seeing(), draft.out)
        self._leave()
        self._scheduler.open(self._running, draft.now)
        self._join_ready()
        self._step()
        if self._cache is not None:
            self.again = self._cache.index.tick(draft.out, draft.now, idle=not self.busy)
        draft.turn.operations = cast("list[TurnOperation]", draft.out)
        return draft.turn

    # What the last turn brought

    def _learn(self, outcome: Outcome) -> None:
        for failed in outcome.failed:
            assert failed.id is not None
            self._requests.abort(failed.id, None, self._draft)
        for result in outcome.rows:
            self._take(self._requests.sequences[result.row], result)
        if outcome.step_fault is not None:
            self._step_fault(outcome.step_fault)
        elif outcome.rows:
            self._quarantine.stepped(self._running)
        for seen in outcome.pictures:
            self._pictures.ran(seen)
            for id in seen.requests if seen.problem is not None else ():
                self._requests.fail(
                    id, f"The picture could not be read: {seen.problem}", self._draft
                )
        self._measure(outcome)
        rows = decode_size([s.length for s in self._running])
        self._prompts.ran(outcome, self._draft, self._pacing.cost.seconds(rows))

    def _measure(self, outcome: Outcome) -> None:
        """What the steps that were read have taken."""
        alone, self._alone = self._alone, None
        if alone is not None and outcome.pass_seconds is not None:
            self._pacing.cost.saw(alone, outcome.pass_seconds)
        if outcome.step_fault is not None:
            self._launched = []
        elif self._reading:
            size = self._launched.pop(0)
            if size is not None and outcome.gap is not None:
                self._pacing.cost.saw(size, outcome.gap)

    def _take(self, sequence: Sequence, result: RowResult) -> None:
        if sequence.unread:
            sequence.unread -= 1
        sequence.tokens += result.tokens
        if result.drafted and self._speculation is not None:
            self._speculation.confirmed(sequence, result.drafted, result.advanced - 1)
        if sequence.phase is Phase.RUNNING and self._drafting:
            sequence.held += result.advanced
        if result.problem is not None:
            self._requests.fail(sequence.request.id, result.problem, self._draft)
        elif result.finish is not None:
            self._requests.end(sequence)
        elif sequence.phase is Phase.LEFT and not sequence.unread:
            if sequence.left > 0:
                self._requests.requeue(sequence, self._draft)
            else:
                self._draft.out.append(Finish(sequence.number, "length"))
                self._requests.end(sequence)

    def _step_fault(self, text: str) -> None:
        """The batch is lost: its rows go again, and whose fault it was is traced."""
        sequences, self._running = self._running, []
        self._drawn = False
        alive = [s for s in sequences if s.phase is Phase.RUNNING]
        for sequence in sequences:
            sequence.unread = 0
            if sequence.phase is Phase.ENDED:
                self._requests.sequences.pop(sequence.number, None)
        for sequence in [s for s in self._requests.sequences.values() if s.phase is Phase.LEFT]:
            sequence.unread = 0
            self._requests.requeue(sequence, self._draft)
        guilty = self._quarantine.fault(alive)
        for sequence in alive:
            sequence.phase = Phase.QUEUED
            if sequence in guilty:
                self._requests.fail(
                    sequence.request.id,
                    f"The model could not be run on this request: {text}",
                    self._draft,
                )
            else:
                self._requests.requeue(sequence, self._draft)

    # The batch

    def _leave(self) -> None:
        """Drop the rows that are done or no longer have room in memory."""
        leaving = [s for s in self._running if s.phase is Phase.ENDED or s.spent]
        staying = [s for s in self._running if s not in leaving] if leaving else self._running
        groups = [j.group for j in self._scheduler.prefills()]
        demoted, yielding = self._scheduler.victims(staying)
        if self._quarantine.apart(staying, groups):
            yielding = staying
        else:
            after = [s for s in staying if s not in yielding] if yielding else staying
            prefills, rows = self._scheduler.displaced(after)
            demoted, yielding = demoted + prefills, yielding + rows
        for prefill in demoted:
            self._prompts.demote(prefill, self._draft)
        for sequence in yielding:
            log.info("request %s gives way to others", sequence.request.id)
        if yielding:
            staying = [s for s in staying if s not in yielding]
        if len(staying) == 1 and not self._scheduler.coming:
            staying, leaving = self._last_one(staying, leaving)
        gone = [*leaving, *yielding]
        if not gone:
            return
        for sequence in gone:
            if self._cache is not None:
                self._cache.row(sequence, self._draft.out, self._draft.now)
        self._draft.out.append(Drop([s.number for s in gone]))
        self._running = staying
        for sequence in gone:
            self._left(sequence)

    def _left(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.ENDED:
            self._requests.sequences.pop(sequence.number, None)
        elif sequence.unread:
            sequence.phase = Phase.LEFT
        else:
            self._requests.requeue(sequence, self._draft)

    def _last_one(
        self, staying: list[Sequence], leaving: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """A row that has all the memory to itself ends where that ends."""
        sequence = staying[0]
        if self._budget.row(sequence.held + 1) <= self._budget.limit:
            return staying, leaving
        log.warning(
            "request %s ends after %d tokens: all %s of key-value memory are its own, and full; "
            "raise --kv-memory for longer answers",
            sequence.request.id,
            len(sequence.tokens),
            format_bytes(self._budget.limit),
        )
        sequence.most = len(sequence.tokens) + sequence.unread
        if not sequence.unread:
            self._draft.out.append(Finish(sequence.number, "length"))
            sequence.phase = Phase.ENDED
        return [], [*leaving, sequence]

    def _join_ready(self) -> None:
        """Let prompts that have been run join the batch."""
        for prefill in self._scheduler.joining(self._running, self._draft.now):
            self._draft.out.append(Join(prefill.number, [s.number for s in prefill.sequences]))
            for sequence in prefill.sequences:
                sequence.phase, sequence.held = Phase.RUNNING, prefill.length - 1
            self._running += prefill.sequences

    def _step(self) -> None:
        """One pass: all rows, then as many prompt tokens as the promise allows."""
        operations, running = self._draft.out, self._running
        lengths = [s.length for s in running]
        size = decode_size(lengths) if running else StepSize(steps=1)
        drafts = self._drafts(size)
        ahead = sum(map(len, drafts.values()))
        if ahead:
            size = decode_size(lengths, ahead)
        prompts, size = self._prompts.plan(running, size, self._draft)
        self._lend({s.number: 1 + len(drafts.get(s.number, ())) for s in running})
        self._reading = self._drawn or (bool(running) and not self._settings.pipelined)
        self._drafting = bool(ahead)
        self._tried = {s.number: 1 + len(drafts.get(s.number, ())) for s in running if ahead}
        if running:
            self._answer(drafts, prompts, None if self._prompts.other else size)
        else:
            if self._drawn:
                operations.append(Read())
            self._drawn = False
            if prompts:
                operations.append(Pass(False, {}, prompts, wait=True))
                self._alone = size
        if self._pacing.cost.known and not self._prompts.other:
            self._draft.turn.expected = self._pacing.cost.seconds(size)

    def _lend(self, counts: dict[int, int]) -> None:
        """Let the prefix cache have what sequences leave of the memory for theirs, with so many more tokens
        of each row."""
        if self._cache is None or not self._settings.lends:
            return
        rows = [s.held + counts[s.number] for s in self._running]
        held = self._budget.total([*rows, *(j.length for j in self._scheduler.coming)])
        free = max(0, self._budget.limit - held)
        self._cache.index.lend(self._draft.out, free, self._draft.now)

    def _answer(
        self, drafts: dict[int, list[int]], prompts: list[PromptRun], size: StepSize | None
    ) -> None:
        """Run a pass of all rows and draw their next tokens."""
        operations = self._draft.out
        operations.append(Pass(True, drafts, prompts))
        if self._settings.pipelined:
            if self._drawn:
                operations.append(Read())
            operations.append(Sample())
        else:
            operations += [Sample(), Read()]
        self._drawn = self._settings.pipelined
        self._launched.append(size)
        for sequence in self._running:
            sequence.unread += 1
            if not drafts:
                sequence.held += 1

    def _drafts(self, size: StepSize) -> dict[int, list[int]]:
        if self._speculation is None or not self._running:
            return {}
        prompts = bool(self._scheduler.waiting)
        proposed = self._speculation.propose(self._running, size, prompts=prompts)
        drafts = {s.number: d for s, d in zip(self._running, proposed, strict=True) if d}
        widths = [s.held + 1 + len(drafts.get(s.number, ())) for s in self._running]
        coming = [j.length for j in self._scheduler.coming]
        return drafts if self._budget.fits([*widths, *coming]) else {}

    def _begin(self, prefill: Prefill) -> None:
        self._prompts.begin(prefill, self._draft)

    def _pace(self) -> float:
        number = self._draft.turn.number
        if self._paced[0] != number:
            self._paced = number, self._pacing.token_seconds(len(self._running))
        return self._paced[1]
