"""A limit on thinking: counts a thought's tokens, and says when it must be ended."""

from __future__ import annotations

import copy

from millrace.protocol import Thinking


class ThinkingBudget:
    def __init__(self, limit: Thinking, generated: list[int]) -> None:
        self._limit = limit
        self._inside = limit.inside
        self._spent = 0
        self._over = False
        self._cut_at: int | None = None
        """The number of generated tokens at which the budget was spent."""
        self.ending = limit.ending
        for i in range(len(generated)):
            self.accept(generated[: i + 1])

    def copy(self) -> ThinkingBudget:
        return copy.copy(self)

    def accept(self, tokens: list[int]) -> bool:
        """Take the last of the tokens made so far; True if the thought must end now."""
        if self._over:
            return False
        if self._inside:
            self._spent += 1
            if _ends_with(tokens, self._limit.closes):
                self._over = True
                return False
        elif _ends_with(tokens, self._limit.opens):
            self._inside = True
        self._over = self._inside and self._spent >= self._limit.budget
        if self._over:
            self._cut_at = len(tokens)
        return self._over

    def pending(self, generated: list[int]) -> list[int]:
        """What is still to be made of the ending, for a row that was cut off in the middle of it."""
        return [] if self._cut_at is None else self.ending[len(generated) - self._cut_at :]


def _ends_with(tokens: list[int], tail: list[int]) -> bool:
    return bool(tail) and tokens[-len(tail) :] == tail
