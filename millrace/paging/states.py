"""State that cannot be paged: one per sequence, of layers that recur or convolve.

Sequences that are decoded together have their state as one batch, which stays as it is from step to step
while its members do. A sequence whose prompt runs has its state by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

Arrays = list[mx.array | None]


class StateLayer:
    """The state of one layer for all sequences."""

    def __init__(self, size: int) -> None:
        """`size` is how many arrays the layer keeps for each sequence."""
        self.size = size
        self._members: list[int] = []
        self._batch: Arrays = [None] * size
        self._alone: dict[int, Arrays] = {}
        self._lent: tuple[list[int], ArraysCache] | None = None

    def lend(self, sequences: Sequence[int], *, fresh: bool = False) -> ArraysCache:
        """A cache for a pass of these sequences, one row each; `return_` takes it back."""
        cache = ArraysCache(self.size)
        if not fresh:
            cache.cache = self._rows(list(sequences))
        self._lent = (list(sequences), cache)
        return cache

    def take_back(self) -> None:
        """Keep what the pass has made of the state."""
        assert self._lent is not None
        (sequences, cache), self._lent = self._lent, None
        if len(sequences) == 1 and sequences != self._members:
            self._alone[sequences[0]] = cache.cache
        else:
            self._batch = cache.cache

    def drop(self, sequence: int) -> None:
        """Forget a sequence; its row leaves the batch with the next change of members."""
        self._alone.pop(sequence, None)
        if sequence in self._members:
            self._members = [-1 if m == sequence else m for m in self._members]

    def has(self, sequence: int) -> bool:
        """Whether there is state of a sequence."""
        return sequence in self._alone or sequence in self._members

    def of(self, sequence: int) -> Arrays:
        """The state of one sequence."""
        if sequence in self._alone:
            return self._alone[sequence]
        at = self._members.index(sequence)
        return [None if a is None else a[at : at + 1] for a in self._batch]

    def put(self, sequence: int, state: Arrays) -> None:
        """Give a sequence a state."""
        self.drop(sequence)
        self._alone[sequence] = state

    def held(self) -> int:
        """How many sequences have state."""
        return len(self._alone) + sum(member >= 0 for member in self._members)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence's state."""
        if self._members:
            return sum(int(a.nbytes) for a in self._batch if a is not None) // len(self._members)
        first: Arrays = next(iter(self._alone.values()), [])
        return sum(int(a.nbytes) for a in first if a is not None)

    @property
    def state(self) -> list[mx.array]:
        found = [self._batch, *self._alone.values()]
        return [a for arrays in found for a in arrays if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(int(a.nbytes) for a in self.state)

    def _rows(self, sequences: list[int]) -> Arrays:
        """The state of these sequences, which become the batch if there are several."""
        if sequences == self._members:
            return self._batch
        if len(sequences) == 1:
            found = self.of(sequences[0])
            self.drop(sequences[0])
            return list(found)
        batch = [self._gathered(element, sequences) for element in range(self.size)]
        kept = {s: self.of(s) for s in self._members if s >= 0 and s not in sequences}
        self._alone = {s: a for s, a in self._alone.items() if s not in sequences} | kept
        self._members, self._batch = sequences, batch
        return batch

    def _gathered(self, element: int, sequences: list[int]) -> mx.array | None:
        where = {s: i for i, s in enumerate(self._members) if s >= 0}
        parts: list[mx.array] = []
        old = self._batch[element]
        begin = 0
        while begin < len(sequences):
            end = begin
            while end < len(sequences) and sequences[end] in where:
                end += 1
            if end > begin:
                if old is None:
                    return None
                rows = [where[s] for s in sequences[begin:end]]
                parts.append(old[mx.array(rows, mx.int32)])
                begin = end
                continue
            one = self._alone[sequences[begin]][element]
            if one is None:
                return None
            parts.append(one)
            begin += 1
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)
