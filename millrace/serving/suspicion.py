"""Who is to blame for an engine's death: which requests may run, and which have to end.

Nobody is blamed for being there. After a death the requests whose work was under way (all, if that
is not known) are on probation together and go back in at once; each is cleared as soon as it gets
beyond where it stood. When the engine dies of them again, they are parted, and the parts are tried
one after the other beside everybody else, until a single request has died often enough.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CRASHES_PER_REQUEST = 2
KILLS_PER_REQUEST = 4
SECONDS_PER_KILL = 5.0
"""By how much a request gives way to others for each kill that it was there for."""
TOKENS_TO_FORGET = 16
"""New tokens after which what a request was blamed for is forgotten."""


class Cause(enum.Enum):
    """How an engine ended."""

    CRASH = enum.auto()
    """By itself: a signal that a fault raises, an exit, or work that never ended."""
    KILL = enum.auto()
    """By a signal that others send; the system does so, too, when memory is short."""
    OUTSIDE = enum.auto()
    """For a reason that no request can have, like having been stopped by a signal."""


class Milestone(NamedTuple):
    """How far a request has come."""

    tokens: int = 0
    prefilled: int = 0
    """Prompt tokens that the engine has run since it was given the request, its draft's among them."""

    def beyond(self, mark: Milestone) -> bool:
        """Prompts are run again after a resume, which is nothing new for one that had tokens."""
        if mark.tokens or self.tokens:
            return self.tokens > mark.tokens
        return self.prefilled > mark.prefilled


@dataclass(eq=False)
class _Group:
    members: dict[int, None]
    """In the order in which they came; there may be thousands, and each is looked up for every token."""
    exclusive: bool = False
    """While it is tried, all others wait: it is about to be found guilty, and that must be certain."""


@dataclass
class _Record:
    """What a request is blamed for."""

    milestone: Milestone
    """Where it stood then."""
    crashes: int = 0
    kills: int = 0

    def forgets(self, now: Milestone) -> None:
        if now.beyond(self.milestone):
            self.kills = 0
        gained = now.tokens - self.milestone.tokens
        if gained >= (TOKENS_TO_FORGET if self.milestone.tokens else 1):
            self.crashes = 0


@dataclass
class Suspicion:
    _groups: list[_Group] = field(default_factory=list)
    """The first is being tried, the others wait."""
    _marks: dict[int, Milestone] = field(default_factory=dict)
    """The furthest that those came that were in flight at a death."""
    _records: dict[int, _Record] = field(default_factory=dict)

    def may_run(self, request: int) -> bool:
        """Whether the engine may have the request now."""
        if not self._groups:
            return True
        trial, *waiting = self._groups
        if request in trial.members:
            return True
        return not trial.exclusive and not any(request in group.members for group in waiting)

    @property
    def watches(self) -> bool:
        """Whether it matters at all how far requests are."""
        return bool(self._records or self._groups)

    def order(self, requests: Iterable[int]) -> list[int]:
        """In which order the engine should have these.

        Those on trial go first, since others wait for how that ends. Those that were there when it
        was killed go last: who kills again and again meets somebody else each time, unless it is
        one of them that has it killed.
        """
        if not self.watches:
            return list(requests)
        trial = self._groups[0].members if self._groups else {}
        kills = {r: record.kills for r, record in self._records.items()}
        return sorted(requests, key=lambda r: (kills.get(r, 0), r not in trial))

    def behind(self, request: int) -> float:
        """By how many seconds it gives way to those that the engine is given with it: a short prompt would
        go first again and again, whatever the order."""
        record = self._records.get(request)
        return SECONDS_PER_KILL * record.kills if record else 0.0

    def suspects(self, request: int) -> bool:
        """Whether engines died while they worked on the request, and it has not been cleared since."""
        return request in self._records or any(request in group.members for group in self._groups)

    def progressed(self, request: int, milestone: Milestone) -> bool:
        """Note how far a request is; True if others may run now that had to wait."""
        if record := self._records.get(request):
            record.forgets(milestone)
            if not record.crashes and not record.kills:
                del self._records[request]
        if not milestone.beyond(self._marks.get(request, Milestone())):
            return False
        return self._clear(request)

    def ended(self, request: int) -> bool:
        """The request is no more; True if others may run now that had to wait."""
        self._marks.pop(request, None)
        self._records.pop(request, None)
        return self._clear(request)

    def died(
        self, in_flight: Mapping[int, Milestone], named: Sequence[int], cause: Cause
    ) -> dict[int, int]:
        """The engine died with these requests; `named` are those whose work was under way, if known.

        Returns whom it has died of, and how often: they must end.
        """
        for request, milestone in in_flight.items():
            self._marks[request] = max(milestone, self._marks.get(request, milestone))
        if cause is Cause.OUTSIDE:
            return {}
        suspects = [r for r in named if r in in_flight] or list(in_flight)
        guilty: dict[int, int] = {}
        if len(suspects) == 1 and named:
            guilty = self._blame(suspects[0], cause)
            if not guilty and cause is Cause.CRASH:
                self._part(suspects)
        elif suspects:
            guilty = self._try(suspects, cause)
        for request in guilty:
            self.ended(request)
        return guilty

    def _try(self, suspects: list[int], cause: Cause) -> dict[int, int]:
        """One of several did it: narrow down whom to try next."""
        trial = self._groups[0] if self._groups else None
        again = [r for r in suspects if trial and r in trial.members]
        if trial is None or not again:
            self._part(suspects)
            return {}
        # New requests may be the cause, too. If they are not tried, each of their crashes halves the group.
        came = [r for r in suspects if r not in trial.members]
        guilty: dict[int, int] = {}
        if len(again) > 1:
            self._groups[:1] = [_Group(dict.fromkeys(part)) for part in self._halves(again)]
        else:
            trial.members = dict.fromkeys(again)
            alone = trial.exclusive or self._crashes(again[0]) + 1 < CRASHES_PER_REQUEST
            trial.exclusive = True
            if cause is Cause.CRASH and alone:
                guilty = self._blame(again[0], cause)
        if came:
            self._part(came)
        return guilty

    def _halves(self, requests: list[int]) -> tuple[list[int], list[int]]:
        """Those that have never got a token are the likelier ones: they are tried apart, and first."""
        fresh = [r for r in requests if not self._marks[r].tokens]
        if 0 < len(fresh) < len(requests):
            return fresh, [r for r in requests if self._marks[r].tokens]
        half = (len(requests) + 1) // 2
        return requests[:half], requests[half:]

    def _crashes(self, request: int) -> int:
        record = self._records.get(request)
        return record.crashes if record else 0

    def _blame(self, request: int, cause: Cause) -> dict[int, int]:
        record = self._records.setdefault(request, _Record(self._marks[request]))
        record.milestone = self._marks[request]
        if cause is Cause.CRASH:
            record.crashes += 1
        else:
            record.kills += 1
        if record.crashes >= CRASHES_PER_REQUEST or record.kills >= KILLS_PER_REQUEST:
            return {request: record.crashes + record.kills}
        return {}

    def _part(self, requests: list[int]) -> None:
        """Have some tried apart from the others, after all that are being tried already."""
        for request in requests:
            self._clear(request)
        self._groups.append(_Group(dict.fromkeys(requests)))

    def _clear(self, request: int) -> bool:
        """Take a request out of its group; True if that lets others run."""
        for place, group in enumerate(self._groups):
            if request in group.members:
                del group.members[request]
                if not group.members:
                    del self._groups[place]
                    return place == 0
                return False
        return False
