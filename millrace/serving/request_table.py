"""The requests of one engine, and the questions that are asked about them for every token.

Each is answered without looking at all requests: with thousands in flight, a look at all of them for each
would be millions of looks.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from millrace.serving.engine_request import EngineRequest


class RequestTable(Mapping[int, EngineRequest]):
    """By the engine's number, in the order of arrival."""

    def __init__(self) -> None:
        self._all: dict[int, EngineRequest] = {}
        self._named: dict[str, dict[int, EngineRequest]] = {}
        """By their ids, and parts of a group by the group's id as well; each also with its caller, since
        ids are a caller's own."""
        self._unsent: dict[int, EngineRequest] = {}
        self._unanswered: set[int] = set()
        self._in_engine: Counter[str] = Counter()
        """How many of each caller the engine has been given; callers with none are not there."""

    def __getitem__(self, number: int) -> EngineRequest:
        return self._all[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, active: EngineRequest) -> None:
        self._all[active.number] = active
        self._unsent[active.number] = active
        self._unanswered.add(active.number)
        for name in _names(active):
            self._named.setdefault(name, {})[active.number] = active

    def remove(self, active: EngineRequest) -> None:
        del self._all[active.number]
        if self._unsent.pop(active.number, None) is None:
            self._count(active.queue_caller, -1)
        self._unanswered.discard(active.number)
        for name in _names(active):
            own = self._named[name]
            del own[active.number]
            if not own:
                del self._named[name]

    def named(self, name: str) -> list[EngineRequest]:
        """The request with this id, or all parts of the group with it."""
        return list(self._named.get(name, {}).values())

    def has(self, name: str, caller: str) -> bool:
        """Whether a caller has a request, or parts of a group, with this id."""
        return _own(name, caller) in self._named

    def is_taken(self, id: str, caller: str) -> bool:
        """Whether a new request of a caller may not have this id; further parts of a group may."""
        group = id.partition("#")[0]
        # A request of an id and parts of a group of the same id are never both there: one tells which.
        first = next(iter(self._named.get(_own(group, caller), {}).values()), None)
        return self.has(id, caller) or (first is not None and first.id == group)

    def answers_by_caller(self) -> Counter[str]:
        """Answers that have not finished, by whose share of the queue they use."""
        answers: Counter[str] = Counter()
        for active in self._all.values():
            answers[active.queue_caller] += active.answers
        return answers

    def is_within_share(self, caller: str, room: int) -> bool:
        """Whether a caller has fewer in the engine than its part of so many places."""
        return self._in_engine[caller] < room // max(1, len(self._in_engine.keys() | {caller}))

    def in_turns(self, numbers: Iterable[int]) -> Iterator[int]:
        """Unsent requests in this order within a caller; between callers, the one with the fewest in the
        engine first. A request that is yielded counts as sent."""
        waiting: dict[str, deque[int]] = {}
        for number in numbers:
            waiting.setdefault(self._all[number].queue_caller, deque()).append(number)
        turns = [(self._in_engine[caller], place, caller) for place, caller in enumerate(waiting)]
        heapq.heapify(turns)
        while turns:
            count, place, caller = turns[0]
            yield waiting[caller].popleft()
            if waiting[caller]:
                heapq.heapreplace(turns, (count + 1, place, caller))
            else:
                heapq.heappop(turns)

    @property
    def unsent(self) -> Mapping[int, EngineRequest]:
        """Those that the engine has not been given."""
        return self._unsent

    @property
    def unanswered(self) -> int:
        """How many have no token yet."""
        return len(self._unanswered)

    @property
    def in_engine(self) -> int:
        """How many the engine has been given."""
        return len(self._all) - len(self._unsent)

    def sent(self, active: EngineRequest) -> None:
        """The engine has been given this one."""
        if self._unsent.pop(active.number, None) is not None:
            self._count(active.queue_caller, 1)

    def answered(self, active: EngineRequest) -> None:
        """It has its first token."""
        self._unanswered.discard(active.number)

    def engine_gone(self) -> None:
        """There is no engine that any of them was given."""
        self._unsent = dict(self._all)
        self._in_engine.clear()

    def _count(self, caller: str, change: int) -> None:
        self._in_engine[caller] += change
        if not self._in_engine[caller]:
            del self._in_engine[caller]


def _names(active: EngineRequest) -> set[str]:
    id, group = active.id, active.id.partition("#")[0]
    return {id, group, _own(id, active.caller), _own(group, active.caller)}


def _own(name: str, caller: str) -> str:
    """Ids have no spaces."""
    return f"{caller} {name}"
