"""Sparse changes to a row's logits: penalties, biases, and stop tokens that may not come yet.

Only the tokens concerned are touched, a few hundred of a vocabulary of a hundred thousand, so a row
without such parameters pays nothing and one with them pays little. The state lives on the host and
is kept up to date token by token.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from millrace.protocol import Sampling

Ids = NDArray[np.int32]
Values = NDArray[np.float32]


def wanted(sampling: Sampling) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.min_tokens
    )


class Penalties:
    """For each token concerned: what its logit is divided by (or multiplied, if negative) and
    what is added to it.
    """

    def __init__(
        self, sampling: Sampling, prompt: list[int], generated: list[int], stops: Iterable[int]
    ) -> None:
        self._sampling = sampling
        self._slot: dict[int, int] = {}
        self._size = 0
        self._ids: Ids = np.zeros(64, np.int32)
        self._factor: Values = np.ones(64, np.float32)
        self._shift: Values = np.zeros(64, np.float32)
        self._counts: dict[int, int] = {}
        self._stops = [self._reserve(t) for t in stops] if sampling.min_tokens else []
        for token, bias in sampling.logit_bias.items():
            slot = self._reserve(token)  # first: it may put larger arrays in place
            self._shift[slot] += bias
        if sampling.repetition_penalty != 1.0:
            for token in set(prompt):
                slot = self._reserve(token)
                self._factor[slot] = sampling.repetition_penalty
        for token in generated:
            self.accept(token)

    def accept(self, token: int) -> None:
        """A token was drawn."""
        s = self._sampling
        if s.repetition_penalty == 1.0 and not s.presence_penalty and not s.frequency_penalty:
            return
        slot = self._reserve(token)
        count = self._counts[token] = self._counts.get(token, 0) + 1
        self._factor[slot] = s.repetition_penalty
        self._shift[slot] -= s.frequency_penalty + (s.presence_penalty if count == 1 else 0.0)

    def active(self, generated: int) -> bool:
        """Whether any logit changes in the next draw."""
        if generated < self._sampling.min_tokens:
            return True
        return self._size > len(self._stops)

    def table(self, generated: int) -> tuple[Ids, Values, Values]:
        """Tokens, factors and shifts for the draw of token number `generated`."""
        n = self._size
        shift = self._shift[:n]
        if generated < self._sampling.min_tokens and self._stops:
            shift = shift.copy()
            shift[self._stops] = -np.inf
        return self._ids[:n], self._factor[:n], shift

    def _reserve(self, token: int) -> int:
        slot = self._slot.get(token)
        if slot is None:
            slot = self._slot[token] = self._size
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._factor = np.concatenate([self._factor, np.ones(slot, np.float32)])
                self._shift = np.concatenate([self._shift, np.zeros(slot, np.float32)])
            self._ids[slot] = token
            self._size += 1
        return slot


def stack(tables: list[tuple[Ids, Values, Values]]) -> tuple[Ids, Values, Values]:
    """Tables of different lengths as rectangles; a short row repeats its first entry."""
    width = max(len(ids) for ids, _, _ in tables)
    shape = (len(tables), width)
    ids, factor, shift = (
        np.empty(shape, np.int32),
        np.empty(shape, np.float32),
        np.empty(shape, np.float32),
    )
    for row, (i, f, s) in enumerate(tables):
        n = len(i)
        ids[row, :n], factor[row, :n], shift[row, :n] = i, f, s
        ids[row, n:], factor[row, n:], shift[row, n:] = i[0], f[0], s[0]
    return ids, factor, shift
