"""What a prefill chunk takes, as a line over its tokens that follows what was seen lately.

A chunk of any size reads all the weights, and looks back at what stands before it; that is the base.
Each token adds its own computing. Both change with the prompt's length and the machine's other work.
"""

from __future__ import annotations

_KEPT = 0.85
"""The share of earlier chunks' say that is left after each further one."""
_LEAST_SHARE = 0.1
"""A token never counts for less than this part of a chunk's seconds per token."""
_SPREAD = 0.05
"""Chunks must differ by this part of their mean size to tell the base from the tokens."""
_HOPE = 0.9
"""Chunks of one size do not tell: tokens are thought cheaper, until a larger chunk is tried."""
_SHRINKING = 0.97
SMALL = 32
"""Tokens of a chunk that shows what a chunk costs by itself."""
_SMALL_ENOUGH, _FORGOTTEN = 2, 64
"""Small chunks that tell, and others after which they no longer do: things change."""
_FIRST_GUESS = 1e-3


class ChunkCost:
    def __init__(self) -> None:
        self.base = 0.0
        self.token = _FIRST_GUESS
        self.largest = 0.0
        """About the most tokens that a chunk has had lately."""
        self._small = 0
        self._since_small = 0
        self._small_seconds = 0.0
        self._large: tuple[int, float] | None = None
        """The last chunk of many tokens, and what it took."""
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._squares = 0.0
        self._products = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    @property
    def least(self) -> float | None:
        """What a small chunk has taken lately; None if there was none."""
        return self._small_seconds if self._small >= _SMALL_ENOUGH else None

    @property
    def worth(self) -> int:
        """How many tokens take as long as a small chunk does; a try, if that is not known."""
        if self.least is None or self._large is None:
            return 4 * SMALL
        tokens, seconds = self._large
        each = max((seconds - self.least) / (tokens - SMALL), 1e-9)
        return int(self.least / each)

    def of(self, tokens: int) -> float:
        return self.base + tokens * self.token

    def saw(self, tokens: int, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        old = (self._weight, self._tokens, self._seconds, self._squares, self._products)
        self._weight, self._tokens, self._seconds, self._squares, self._products = (
            _KEPT * before + now for before, now in zip(old, new, strict=True)
        )
        self.largest = max(float(tokens), _SHRINKING * self.largest)
        self._since_small = 0 if tokens <= SMALL else self._since_small + 1
        if tokens <= SMALL:
            before = self._small_seconds if self._small else seconds
            self._small_seconds = _KEPT * before + (1 - _KEPT) * seconds
            self._small += 1
        elif self._since_small > _FORGOTTEN:
            self._small = 0
        if tokens >= 4 * SMALL:
            self._large = (tokens, seconds)
        self._fit()

    def _fit(self) -> None:
        size, time = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - size * size
        if spread > (_SPREAD * size) ** 2:
            self.token = (self._products / self._weight - size * time) / spread
        else:
            self.token *= _HOPE
        self.token = max(_LEAST_SHARE * time / size, min(time / size, self.token), 1e-9)
        self.base = max(0.0, time - self.token * size)
