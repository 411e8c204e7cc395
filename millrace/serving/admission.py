"""Who is let in: a bound on running and waiting answers, and what a refused client is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millrace.errors import Overloaded

_EMA_WEIGHT = 0.2


@dataclass
class Admission:
    max_running: int
    max_queue: int
    mean_seconds: float = 1.0
    """How long requests take from arrival to end, lately."""

    reserved: int = 0
    """Answers that were admitted and whose requests have not all come yet."""

    @property
    def room(self) -> int:
        return self.max_running + self.max_queue

    @contextlib.contextmanager
    def reserve(self, answers: int) -> Iterator[Callable[[int], None]]:
        """Keep places for answers whose requests come one after the other; told of each that came."""
        left = answers
        self.reserved += answers

        def came(count: int) -> None:
            nonlocal left
            left -= count
            self.reserved -= count

        try:
            yield came
        finally:
            self.reserved -= left

    def check(self, present: int, wanted: int) -> None:
        """Raise Overloaded if `wanted` more answers beside the `present` ones are too many.

        One request is served by itself, however many answers it asks for (see batches.py for the bound).
        """
        room = self.room
        present += self.reserved
        if present and present + wanted > room:
            raise Overloaded(
                f"The server is busy: {present} answers are running or waiting, and it takes "
                f"{room} (--max-running {self.max_running}, --max-queue {self.max_queue}). "
                "Try again in a moment.",
                retry_after=self._wait(),
            )

    def saw(self, seconds: float) -> None:
        self.mean_seconds += _EMA_WEIGHT * (seconds - self.mean_seconds)

    def _wait(self) -> float:
        """About when one of those ahead will be done."""
        return min(60.0, max(1.0, self.mean_seconds / max(1, self.max_running)))
