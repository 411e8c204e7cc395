"""Which tokens of a prompt stay, from what a draft thinks of them. Pure numbers, no model.

The prompt's head (system prompt and tools) and its tail (the last message) always stay. What lies between
is ranked in chunks, and the best of them stay. The ranking knows nothing of what happens to be cached, so
that the same prompt is cut the same way twice; what is cached stays beside it, since it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from millrace.protocol.specprefill import Ranges, SparsePrefill

CHUNK = 32
"""Tokens that stay or go together."""
LEAST_HEAD = 32
"""Tokens at the beginning that stay without a system prompt: models park their attention there."""
LEAST_TAIL = 512
_WORTH = 0.5
"""The part of what is left to run that must be open to choice, where nobody asked for it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """The tokens of a prompt that stay."""

    ranges: tuple[tuple[int, int], ...]
    total: int
    """Tokens of the whole prompt."""

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]], total: int) -> Kept:
        """Raises ValueError where these are no runs of such a prompt, or its last token is not in them."""
        found = tuple((int(first), int(end)) for first, end in ranges)
        done = 0
        for first, end in found:
            if not done <= first < end <= total:
                raise ValueError("What is kept of the prompt is not in order.")
            done = end
        if done != total:
            raise ValueError("What is kept of the prompt ends before it does.")
        return cls(found, total)

    @property
    def count(self) -> int:
        return sum(end - first for first, end in self.ranges)

    @property
    def dropped(self) -> int:
        return self.total - self.count

    @property
    def exact(self) -> int:
        """Tokens before the first that is left out: their state is what it always is."""
        first, end = self.ranges[0]
        return end if first == 0 else 0

    def of_prompt(self, tokens: list[T]) -> list[T]:
        """A prompt's tokens without those that are left out."""
        return [token for first, end in self.ranges for token in tokens[first:end]]

    def positions(self, begin: int, end: int) -> list[int]:
        """Where the tokens begin … end-1 of what is left stand, those generated after it too."""
        found: list[int] = []
        done = 0
        for first, last in (*self.ranges, (self.total, self.total + end)):
            found += range(first + max(0, begin - done), min(last, first + end - done))
            done += last - first
        return found


def middle(sparse: SparsePrefill, length: int, window: int = 0) -> tuple[int, int]:
    """From where to where tokens of a prompt may be left out; `window` is how far back the model's
    sliding windows look."""
    head = min(length, max(sparse.head, LEAST_HEAD))
    tail = length if sparse.tail is None else sparse.tail
    return head, max(head, min(tail, length - max(LEAST_TAIL, window)))


def worthwhile(sparse: SparsePrefill, length: int, known: int, window: int = 0) -> bool:
    """Whether a prompt is to be scored of which the state of `known` tokens is there."""
    head, tail = middle(sparse, length, window)
    first = max(head, known)
    chunks = -(-(tail - head) // CHUNK)
    if tail - first < CHUNK or math.ceil(chunks * sparse.keep) >= chunks:
        return False
    left = length - first
    return not sparse.least or (left > sparse.least and tail - first >= _WORTH * left)


def select(
    scores: npt.NDArray[Any], sparse: SparsePrefill, length: int, known: int = 0, window: int = 0
) -> Kept:
    """What stays of a prompt whose tokens are worth this much each."""
    head, tail = middle(sparse, length, window)
    starts = list(range(head, tail, CHUNK))
    ends = [min(start + CHUNK, tail) for start in starts]
    worth = np.nan_to_num(np.asarray(scores, np.float64))
    means = [float(worth[start:end].mean()) for start, end in zip(starts, ends, strict=True)]
    ranked = sorted(range(len(starts)), key=lambda n: (-means[n], n))
    chosen = sorted(ranked[: math.ceil(len(starts) * sparse.keep)])
    stays = [(0, max(head, min(known, length))), *((starts[n], ends[n]) for n in chosen)]
    return Kept(tuple(_joined([*stays, (tail, length)])), length)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Runs in order of their beginnings as few, none of which touches another."""
    found: Ranges = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found
