"""Detection of answers that repeat themselves, on token ids.

A small model can fall into a loop and write the same sentence until its limit. The loop guard ends such
an answer. Exact repetition of token ids is required, so that lists, tables and poems with a refrain, which
differ in some token, are left alone.
"""

from __future__ import annotations

from collections import deque

import msgspec

LONGEST_PERIOD = 64
"""Tokens of the longest unit whose repetition is a loop."""
MOST_REPEATED = 256
"""Tokens that may repeat with a period before the answer counts as a loop."""


class AnswerLoop(msgspec.Struct, frozen=True, tag="loop"):
    """The repetition that ended an answer: its last `tokens` tokens have this period.

    It is reported as it is, with its type, under `finish_details` of every protocol.
    """

    period: int
    tokens: int


class LoopDetector:
    """Reads one answer token by token.

    Per token it looks only at earlier occurrences of the same token within the longest period, so that
    ordinary text costs a few comparisons.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=LONGEST_PERIOD)
        self._repeated: dict[int, int] = {}
        """By period: how many of the last tokens have it. Only periods that the last token continues."""

    def accept(self, token: int) -> AnswerLoop | None:
        """Take the next token; returns the loop that it completes, the one with the shortest period."""
        recent, before = self._recent, self._repeated
        size = len(recent)
        repeated: dict[int, int] = {}
        at = 0
        while True:
            try:
                at = recent.index(token, at)
            except ValueError:
                break
            period = size - at
            repeated[period] = before.get(period, period) + 1
            at += 1
        recent.append(token)
        self._repeated = repeated
        long = [period for period, tokens in repeated.items() if tokens > MOST_REPEATED]
        return AnswerLoop(min(long), repeated[min(long)]) if long else None
