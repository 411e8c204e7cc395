"""A limit on thinking: counts a thought's tokens, and says when it must be ended."""

from __future__ import annotations

from millrace.protocol import Thinking


class ThinkingBudget:
    def __init__(self, limit: Thinking, generated: list[int]) -> None:
        self._limit = limit
        self._inside = limit.inside
        self._spent = 0
        self._over = False
        self.ending = limit.ending
        for i in range(len(generated)):
            self.accept(generated[: i + 1])

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
        return self._over

    def pending(self, generated: list[int]) -> list[int]:
        """What is still to be made of the ending, for a row that was cut off in the middle of it."""
        if not self._over or _holds(generated, self._limit.closes):
            return []
        for n in range(len(self.ending), -1, -1):
            if generated[len(generated) - n :] == self.ending[:n]:
                return list(self.ending[n:])
        return list(self.ending)


def _ends_with(tokens: list[int], tail: list[int]) -> bool:
    return bool(tail) and tokens[-len(tail) :] == tail


def _holds(tokens: list[int], part: list[int]) -> bool:
    n = len(part)
    return any(tokens[i : i + n] == part for i in range(len(tokens) - n + 1))
