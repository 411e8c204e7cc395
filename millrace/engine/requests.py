"""The requests that the engine has: what comes, what is aborted or fails, and what queues again.

It owns the rows of requests that have not ended, and turns messages into prompts for the scheduler. Who
runs, and what the batch is made of, it does not know. Pure: what is to be done goes into the draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.cache.residency import Operations
from millrace.engine.books import Job, Phase, Seat, Stage, grouped
from millrace.engine.cache_use import CacheUse
from millrace.engine.memory import Budget
from millrace.engine.pictures import Pictures, keys_of, misplaced
from millrace.engine.scheduler import Scheduler
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
        self.seats: dict[int, Seat] = {}
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
            for s in self.seats.values()
            if s.request.id == id and choice in (None, s.choice) and s.phase is not Phase.ENDED
        ]
        if not ended:
            return
        draft.out.append(Forget([s.number for s in ended]))
        for seat in ended:
            self.end(seat)
        for job in [j for j in self._scheduler.jobs() if j.request.id == id]:
            # One that is given up still has the seats by which it is known what of it is exact.
            if staying := [s for s in job.seats if s.phase is not Phase.ENDED]:
                job.seats = staying
            else:
                self._give_up(job, draft)

    def fail(self, id: int, problem: str, draft: TurnDraft) -> None:
        self.abort(id, None, draft)
        draft.turn.refused.append(Failed("request_failed", problem, id))

    def end(self, seat: Seat) -> None:
        """No token of it counts any more; it leaves the batch, if it is there, when it can."""
        if seat.phase is not Phase.RUNNING:
            self.seats.pop(seat.number, None)
        seat.phase = Phase.ENDED

    def requeue(self, seat: Seat, draft: TurnDraft) -> None:
        """A row that had to leave comes back with all that it has."""
        seat.phase, seat.held = Phase.QUEUED, 0
        self._queue([seat], [*seat.keys, *seat.tokens], draft)

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
        seats = [
            Seat(next(self._numbers), request, c.index, list(c.generated), arrived, keys, kept)
            for c in request.choices
        ]
        self.seats |= {s.number: s for s in seats}
        draft.out.append(Admit(request, [s.number for s in seats]))
        for places in grouped(request.choices):
            tokens = [*keys, *request.choices[places[0]].generated]
            job = self._queue([seats[p] for p in places], tokens, draft)
            if scored:
                assert self._scorings is not None
                self._scorings.add(job)

    def scored(self, found: Scored, draft: TurnDraft) -> None:
        """The draft has done with a prompt: what it chose is what runs."""
        job, kept = found.job, found.kept
        if job.stage is Stage.OVER:
            return
        job.unscored = False
        if kept is None or found.told is None:
            self.fail(job.request.id, f"The draft could not be run: {found.problem}", draft)
            return
        draft.turn.selected.append(found.told)
        if kept.dropped:
            keys = kept.of_prompt(job.seats[0].keys)
            for seat in job.seats:
                seat.keys, seat.kept = keys, kept
            job.tokens = keys
            job.sight = len(keys)
            if self._cache is not None:
                self._cache.narrowed(job)
        if (problem := self._too_large(len(job.tokens))) is not None:
            self.fail(job.request.id, problem, draft)

    def _too_large(self, tokens: int) -> str | None:
        """Why a prompt with so many tokens to run has no room."""
        if (needed := self._budget.row(tokens + 1)) <= self._budget.limit:
            return None
        return (
            f"The prompt needs {format_bytes(needed)} of key-value memory and the budget is "
            f"{format_bytes(self._budget.limit)}. Shorten it, or raise --kv-memory."
        )

    def _queue(self, seats: list[Seat], tokens: list[int], draft: TurnDraft) -> Job:
        job = Job(next(self._numbers), seats[0].request, seats, tokens, seats[0].arrived)
        if self._cache is not None:
            self._cache.expect(job, draft.out)
        if job.request.media:
            self._pictures.look(job)
        self._scheduler.add(job)
        return job

    def _give_up(self, job: Job, draft: TurnDraft) -> None:
        if job.begun:
            if self._cache is not None and job.done:
                self._cache.dropped(job, draft.out, draft.now)
            draft.out.append(Release(job.number))
        elif self._cache is not None:
            self._cache.unwanted(job)
        self._scheduler.discard(job)


def _kept(request: Submit) -> Kept | None:
    """What stayed of a prompt before a resume; raises ValueError where that cannot be."""
    if request.sparse is None or request.sparse.kept is None:
        return None
    kept = Kept.of(request.sparse.kept, len(request.prompt))
    return kept if kept.dropped else None
