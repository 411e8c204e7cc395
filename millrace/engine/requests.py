"""The requests that the engine has: what comes, what is aborted or fails, and what queues again.

It owns the rows of requests that have not ended, and turns messages into prompts for the scheduler. Who
runs, and what the batch is made of, it does not know. Pure: what is to be done goes into the draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.cache.residency import Operations
from millrace.engine.cache_use import CacheUse
from millrace.engine.memory import Budget
from millrace.engine.pictures import Pictures, keys_of, misplaced
from millrace.engine.scheduler import Scheduler
from millrace.engine.sequences import Phase, Prefill, Sequence, Stage, grouped
from millrace.engine.specprefill.scorings import Scored, Scorings
from millrace.engine.specprefill.selection import Kept
from millrace.engine.turn import Admit, Forget, PlaceAdapter, Release, RemoveAdapter, Turn
from millrace.protocol import (
    Abort,
    AbortChoice,
    Failed,
    LoadAdapter,
    Picture,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from millrace.protocol.prefixes import CacheQuery
from millrace.sizes import format_bytes

RESUMED_SECONDS = 25.0
"""How much waiting it is worth to have been under way: less than a step of priority."""


@dataclass
class TurnDraft:
    """A turn, as far as it is decided."""

    turn: Turn
    now: float = 0.0
    out: Operations = field(default_factory=list)


class RequestBook:
    def __init__(
        self,
        scheduler: Scheduler,
        budget: Budget,
        cache: CacheUse | None,
        pictures: Pictures,
        numbers: Iterator[int],
        scorings: Scorings | None = None,
    ) -> None:
        """`numbers` name rows and prompts, each with one of its own. Without `scorings`, no prompt is
        cut."""
        self._scheduler = scheduler
        self._budget = budget
        self._cache = cache
        self._pictures = pictures
        self._numbers = numbers
        self._scorings = scorings
        self.sequences: dict[int, Sequence] = {}
        """Rows by number, until they have ended and left the batch."""

    def receive(self, message: ToEngine, draft: TurnDraft) -> None:
        match message:
            case Submit():
                self._admit(message, draft)
            case Abort(id=id):
                self.abort(id, None, draft)
            case AbortChoice(id=id, choice=choice):
                self.abort(id, choice, draft)
            case LoadAdapter(slot=slot, name=name, path=path, digest=digest):
                draft.out.append(PlaceAdapter(slot, name, path, digest))
            case Picture(digest=digest):
                self._pictures.arrived(digest, draft.out)
            case UnloadAdapter(slot=slot):
                draft.out.append(RemoveAdapter(slot))
            case CacheQuery(clear=True):
                self._pictures.forget()
                if self._scorings is not None:
                    self._scorings.clear(draft.out)
                if self._cache is not None:
                    self._cache.index.clear(draft.out)

    def abort(self, id: int, choice: int | None, draft: TurnDraft) -> None:
        """End a request, or one of its choices."""
        ended = [
            s
            for s in self.sequences.values()
            if s.request.id == id and choice in (None, s.choice) and s.phase is not Phase.ENDED
        ]
        if not ended:
            return
        draft.out.append(Forget([s.number for s in ended]))
        for sequence in ended:
            self.end(sequence)
        for prefill in [j for j in self._scheduler.prefills() if j.request.id == id]:
            # One that is given up still has the sequences by which it is known what of it is exact.
            if staying := [s for s in prefill.sequences if s.phase is not Phase.ENDED]:
                prefill.sequences = staying
            else:
                self._give_up(prefill, draft)

    def fail(self, id: int, problem: str, draft: TurnDraft) -> None:
        self.abort(id, None, draft)
        draft.turn.refused.append(Failed("request_failed", problem, id))

    def end(self, sequence: Sequence) -> None:
        """No token of it counts any more; it leaves the batch, if it is there, when it can."""
        if sequence.phase is not Phase.RUNNING:
            self.sequences.pop(sequence.number, None)
        sequence.phase = Phase.ENDED

    def requeue(self, sequence: Sequence, draft: TurnDraft) -> None:
        """A row that had to leave comes back with all that it has."""
        sequence.phase, sequence.held = Phase.QUEUED, 0
        self._queue([sequence], [*sequence.keys, *sequence.tokens], draft)

    def _admit(self, request: Submit, draft: TurnDraft) -> None:
        if (problem := misplaced(request)) is not None:
            draft.turn.refused.append(Failed("invalid_request", problem, request.id))
            return
        keys = keys_of(request)
        try:
            kept = _kept(request)
        except ValueError as error:
            draft.turn.refused.append(Failed("invalid_request", str(error), request.id))
            return
        if kept is not None:
            keys = kept.of_prompt(keys)
        scored = False
        if self._scorings is not None and request.sparse is not None:
            known = self._cache.index.known(request.cache_salt, keys) if self._cache else 0
            scored = self._scorings.wanted(request, known)
            problem = self._scorings.problem(request) if scored else None
            if problem is not None and not request.sparse.least:
                draft.turn.refused.append(Failed("invalid_request", problem, request.id))
                return
            scored = scored and problem is None
        longest = max(len(c.generated) for c in request.choices) + len(keys)
        if not scored and (problem := self._too_large(longest)) is not None:
            draft.turn.refused.append(Failed("invalid_request", problem, request.id))
            return
        # Those that were being answered when an engine ended go on before those that were not.
        arrived = draft.now - RESUMED_SECONDS * any(c.generated for c in request.choices)
        arrived += request.behind
        sequences = [
            Sequence(next(self._numbers), request, c.index, list(c.generated), arrived, keys, kept)
            for c in request.choices
        ]
        self.sequences |= {s.number: s for s in sequences}
        draft.out.append(Admit(request, [s.number for s in sequences]))
        for places in grouped(request.choices):
            tokens = [*keys, *request.choices[places[0]].generated]
            prefill = self._queue([sequences[p] for p in places], tokens, draft)
            if scored:
                assert self._scorings is not None
                self._scorings.add(prefill)

    def scored(self, found: Scored, draft: TurnDraft) -> None:
        """The draft has done with a prompt: what it chose is what runs."""
        prefill, kept = found.prefill, found.kept
        if prefill.stage is Stage.OVER:
            return
        prefill.unscored = False
        if kept is None or found.told is None:
            self.fail(prefill.request.id, f"The draft could not be run: {found.problem}", draft)
            return
        draft.turn.selected.append(found.told)
        if kept.dropped:
            keys = kept.of_prompt(prefill.sequences[0].keys)
            for sequence in prefill.sequences:
                sequence.keys, sequence.kept = keys, kept
            prefill.tokens = keys
            prefill.visible = len(keys)
            if self._cache is not None:
                self._cache.narrowed(prefill)
        if (problem := self._too_large(len(prefill.tokens))) is not None:
            self.fail(prefill.request.id, problem, draft)

    def _too_large(self, tokens: int) -> str | None:
        """Why a prompt with so many tokens to run has no room."""
        if (needed := self._budget.row(tokens + 1)) <= self._budget.limit:
            return None
        return (
            f"The prompt needs {format_bytes(needed)} of key-value memory and the budget is "
            f"{format_bytes(self._budget.limit)}. Shorten it, or raise --kv-memory."
        )

    def _queue(self, sequences: list[Sequence], tokens: list[int], draft: TurnDraft) -> Prefill:
        prefill = Prefill(
            next(self._numbers), sequences[0].request, sequences, tokens, sequences[0].arrived
        )
        if self._cache is not None:
            self._cache.expect(prefill, draft.out)
        if prefill.request.media:
            self._pictures.look(prefill)
        self._scheduler.add(prefill)
        return prefill

    def _give_up(self, prefill: Prefill, draft: TurnDraft) -> None:
        if prefill.begun:
            if self._cache is not None and prefill.done:
                self._cache.dropped(prefill, draft.out, draft.now)
            draft.out.append(Release(prefill.number))
        elif self._cache is not None:
            self._cache.unwanted(prefill)
        self._scheduler.discard(prefill)


def _kept(request: Submit) -> Kept | None:
    """What stayed of a prompt before a resume; raises ValueError where that cannot be."""
    if request.sparse is None or request.sparse.kept is None:
        return None
    kept = Kept.of(request.sparse.kept, len(request.prompt))
    return kept if kept.dropped else None
