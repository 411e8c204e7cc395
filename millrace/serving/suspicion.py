"""Who is to blame for an engine's death: which requests may run, and which have to end.

Nobody is blamed for being there. After a death the requests that may have caused it are on probation
together and all go back in at once; each is cleared as soon as it gets beyond where it stood. When
the engine dies again first, that group is halved, and the halves are tried one after the other
beside everybody else, until a single request has died often enough. Pure: no clock, no engine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CRASHES_PER_REQUEST = 2
KILLS_PER_REQUEST = 4
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


@dataclass(frozen=True)
class Milestone:
    """How far a request has come."""

    tokens: int = 0
    prefilled: int = 0
    """Prompt tokens that the engine has run since it was given the request."""
    decoding: bool = False
    """That engine has made a token for it."""

    def beyond(self, mark: Milestone) -> bool:
        if self.tokens > mark.tokens:
            return True
        # What is run again after a resume is nothing new, unless the prompt was never run through.
        return not mark.decoding and self.prefilled > mark.prefilled


@dataclass(eq=False)
class _Group:
    members: list[int]
    exclusive: bool = False
    """While it is tried, only requests that have shown themselves to be harmless run beside it."""


@dataclass
class _Record:
    """What a request is blamed for."""

    standing: Milestone
    """Where it stood then."""
    crashes: int = 0
    kills: int = 0

    def forgets(self, now: Milestone) -> None:
        if now.beyond(self.standing):
            self.kills = 0
        gained = now.tokens - self.standing.tokens
        if gained >= (TOKENS_TO_FORGET if self.standing.decoding else 1):
            self.crashes = 0


@dataclass
class Suspicion:
    _groups: list[_Group] = field(default_factory=list)
    """The first is being tried, the others wait."""
    _marks: dict[int, Milestone] = field(default_factory=dict)
    """Where those stood that were in flight at the last death, and have not got beyond it yet."""
    _records: dict[int, _Record] = field(default_factory=dict)

    def may_run(self, request: int, standing: Milestone) -> bool:
        """Whether the engine may have the request now."""
        if not self._groups:
            return True
        trial, *waiting = self._groups
        if request in trial.members:
            return True
        if any(request in group.members for group in waiting):
            return False
        return not trial.exclusive or standing.tokens > 0 or standing.prefilled > 0

    @property
    def on_trial(self) -> Sequence[int]:
        """Whom the engine should have first: the sooner they are cleared, the better for all."""
        return self._groups[0].members if self._groups else ()

    def progressed(self, request: int, standing: Milestone) -> bool:
        """Note how far a request is; True if others may run now that had to wait."""
        if record := self._records.get(request):
            record.forgets(standing)
            if not record.crashes and not record.kills:
                del self._records[request]
        mark = self._marks.get(request)
        if mark is None or not standing.beyond(mark):
            return False
        del self._marks[request]
        return self._clear(request)

    def ended(self, request: int) -> bool:
        """The request is no more; True if others may run now that had to wait."""
        self._marks.pop(request, None)
        self._records.pop(request, None)
        return self._clear(request)

    def died(
        self, in_flight: Mapping[int, Milestone], named: Sequence[int], cause: Cause
    ) -> dict[int, int]:
        """The engine died with these requests; `named` are those that it was working on.

        Returns whom it has died of, and how often: they must end.
        """
        if cause is Cause.OUTSIDE:
            self._marks = dict(in_flight) | self._marks
        if cause is Cause.OUTSIDE or not in_flight:
            return {}
        trial = self._groups[0] if self._groups else None
        others = [r for r, s in in_flight.items() if not self._moved(r, s)]
        guilty: dict[int, int] = {}
        if len(named) == 1 and named[0] in in_flight:
            guilty = self._blame(named[0], in_flight[named[0]], cause)
            if named[0] not in guilty:
                self._part(named[0])
        elif trial is None:
            self._groups = [_Group(list(in_flight))]
        elif len(trial.members) > 1:
            half = (len(trial.members) + 1) // 2
            self._groups[:1] = [_Group(trial.members[:half]), _Group(trial.members[half:])]
        elif cause is Cause.CRASH and (suspect := trial.members[0]) in in_flight:
            others = [r for r in others if r != suspect and not self._grouped(r)]
            if others and self._crashes(suspect) + 1 >= CRASHES_PER_REQUEST:
                # It may have been one of these just as well: once more without them.
                trial.exclusive = True
                self._groups.append(_Group(others))
            else:
                guilty = self._blame(suspect, in_flight[suspect], cause)
        self._marks |= in_flight
        for request in guilty:
            self.ended(request)
        return guilty

    def _moved(self, request: int, standing: Milestone) -> bool:
        """Whether it got on since the last death."""
        return standing.beyond(self._marks.get(request, Milestone()))

    def _grouped(self, request: int) -> bool:
        return any(request in group.members for group in self._groups)

    def _crashes(self, request: int) -> int:
        record = self._records.get(request)
        return record.crashes if record else 0

    def _blame(self, request: int, standing: Milestone, cause: Cause) -> dict[int, int]:
        record = self._records.setdefault(request, _Record(standing))
        record.standing = standing
        if cause is Cause.CRASH:
            record.crashes += 1
        else:
            record.kills += 1
        if record.crashes >= CRASHES_PER_REQUEST or record.kills >= KILLS_PER_REQUEST:
            return {request: record.crashes + record.kills}
        return {}

    def _part(self, request: int) -> None:
        """Have a request tried on its own, after all that are being tried already."""
        self._clear(request)
        self._groups.append(_Group([request]))

    def _clear(self, request: int) -> bool:
        """Take a request out of its group; True if that lets others run."""
        for place, group in enumerate(self._groups):
            if request in group.members:
                group.members.remove(request)
                if not group.members:
                    del self._groups[place]
                    return place == 0
                return False
        return False
