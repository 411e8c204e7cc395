"""Admission: a bound on the running and waiting answers of a model, divided between callers.

One caller may use the whole room. A caller that comes when others have filled it is still admitted up to
its equal share, so that no key's load refuses another's. With k callers the total is at most the room
times 1 + 1/2 + … + 1/k.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from millrace.caller import current_caller
from millrace.errors import Overloaded

_EMA_WEIGHT = 0.2


@dataclass
class Admission:
    max_running: int
    max_queue: int
    mean_seconds: float = 1.0
    """How long requests take from arrival to end, lately."""

    reserved: Counter[str] = field(default_factory=Counter)
    """By caller: answers that were admitted and whose requests have not all come yet."""

    @property
    def room(self) -> int:
        return self.max_running + self.max_queue

    @contextlib.contextmanager
    def reserve(self, answers: int) -> Iterator[Callable[[int], None]]:
        """Keep places for answers whose requests come one after the other; told of each that came."""
        left = answers
        caller = current_caller.get()
        self.reserved[caller] += answers

        def came(count: int) -> None:
            nonlocal left
            left -= count
            self._release(caller, count)

        try:
            yield came
        finally:
            self._release(caller, left)

    def _release(self, caller: str, answers: int) -> None:
        self.reserved[caller] -= answers
        if not self.reserved[caller]:
            del self.reserved[caller]

    def check(self, present: Mapping[str, int], wanted: int) -> None:
        """Raise Overloaded if `wanted` more answers of the current caller are too many beside those that
        are `present`, by caller.

        One request is served by itself, however many answers it asks for (see batches.py for the bound).
        """
        held = Counter(present) + self.reserved
        total, room = held.total(), self.room
        if not total or total + wanted <= room:
            return
        caller = current_caller.get()
        own, callers = held[caller], len(held.keys() | {caller})
        if own + wanted <= room // callers:
            return
        whose = f", {own} of them yours" if callers > 1 else ""
        raise Overloaded(
            f"The server is busy: {total} answers are running or waiting{whose}, and it takes "
            f"{room} (--max-running {self.max_running}, --max-queue {self.max_queue}). "
            "Try again in a moment.",
            retry_after=self._wait(),
        )

    def saw(self, seconds: float) -> None:
        self.mean_seconds += _EMA_WEIGHT * (seconds - self.mean_seconds)

    def _wait(self) -> float:
        """About when one of those ahead will be done."""
        return min(60.0, max(1.0, self.mean_seconds / max(1, self.max_running)))
