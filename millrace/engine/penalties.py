"""Sparse changes to a row's logits: penalties, biases, and tokens that may not come yet or at all.

Only the tokens concerned are touched, a few hundred of a vocabulary of a hundred thousand, so a row
without such parameters pays nothing and one with them pays little. The state lives on the host and
is kept up to date token by token. Ids outside the logits' width change nothing: no scatter gets one.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from millrace.protocol import Sampling

Ids = NDArray[np.int32]
Values = NDArray[np.float32]
Table = tuple[Ids, Values, Values]
_IDS = range(2**31)
"""What an index can hold."""


def wanted(sampling: Sampling) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.bad_words
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
        held_back = [t for t in stops if t in _IDS] if sampling.min_tokens else []
        self._stops: Ids = np.unique(np.array(held_back, np.int32))
        self._words = [tuple(w) for w in sampling.bad_words if w and w[-1] in _IDS]
        self._recent: deque[int] = deque(maxlen=max(map(len, self._words), default=1))
        for token, bias in sampling.logit_bias.items():
            if token in _IDS:
                slot = self._reserve(token)  # first: it may put larger arrays in place
                self._shift[slot] += bias
        if sampling.repetition_penalty != 1.0:
            for token in set(prompt):
                slot = self._reserve(token)
                self._factor[slot] = sampling.repetition_penalty
        for token in generated:
            self.accept(token)

    def copy(self) -> Penalties:
        new = copy.copy(self)
        new._slot, new._counts = dict(self._slot), dict(self._counts)
        new._ids, new._factor, new._shift = (
            self._ids.copy(),
            self._factor.copy(),
            self._shift.copy(),
        )
        new._recent = self._recent.copy()
        return new

    def accept(self, token: int) -> None:
        """A token was drawn."""
        self._recent.append(token)
        s = self._sampling
        if s.repetition_penalty == 1.0 and not s.presence_penalty and not s.frequency_penalty:
            return
        slot = self._reserve(token)
        count = self._counts[token] = self._counts.get(token, 0) + 1
        self._factor[slot] = s.repetition_penalty
        self._shift[slot] -= s.frequency_penalty + (s.presence_penalty if count == 1 else 0.0)

    def active(self) -> bool:
        """Whether any logit changes in the next draw."""
        return self._size > 0

    def table(self) -> Table:
        """Tokens, factors and shifts for the next draw."""
        n = self._size
        return self._ids[:n], self._factor[:n], self._shift[:n]

    def banned(self, generated: int, width: int) -> Ids:
        """What may not be token number `generated`: stop tokens too early, ends of bad words."""
        held_back = self._stops if generated < self._sampling.min_tokens else self._stops[:0]
        if self._words:
            recent = tuple(self._recent)
            ends = [w[-1] for w in self._words if recent[len(recent) - len(w) + 1 :] == w[:-1]]
            held_back = np.unique(np.concatenate([held_back, np.array(ends, np.int32)]))
        return held_back[held_back < width]

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


def stack(tables: list[Table], width: int) -> Table:
    """Tables of different lengths as rectangles; a short row repeats its first entry.

    Entries outside the logits' width are left out, and a row without any changes nothing.
    """
    sound = [_inside(table, width) for table in tables]
    shape = (len(sound), max(len(ids) for ids, _, _ in sound))
    ids, factor, shift = (
        np.empty(shape, np.int32),
        np.empty(shape, np.float32),
        np.empty(shape, np.float32),
    )
    for row, (i, f, s) in enumerate(sound):
        n = len(i)
        ids[row, :n], factor[row, :n], shift[row, :n] = i, f, s
        ids[row, n:], factor[row, n:], shift[row, n:] = i[0], f[0], s[0]
    return ids, factor, shift


_NOTHING: Table = (np.zeros(1, np.int32), np.ones(1, np.float32), np.zeros(1, np.float32))


def _inside(table: Table, width: int) -> Table:
    ids, factor, shift = table
    kept = (ids >= 0) & (ids < width)
    if not kept.all():
        ids, factor, shift = ids[kept], factor[kept], shift[kept]
    return (ids, factor, shift) if len(ids) else _NOTHING
