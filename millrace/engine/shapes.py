"""The sizes that arrays may have. On a GPU a new shape costs a plan, a compile or a captured graph,
so lengths there come from small sets; a CPU does not mind, and computes nothing that is not needed.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORT = (16, 32, 64, 128)
_FEW = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Shapes:
    recurring: bool = False
    """Whether sizes come from small sets."""
    padding: bool = True
    """Whether a chunk may run past a prompt's end: all of the state can be cut back."""
    grain: int = 1
    """Tokens that the model computes at once: as many as make a chunk cost no less."""

    def length(self, tokens: int) -> int:
        """What a chunk of so many tokens is padded to."""
        if not self.recurring or not self.padding:
            return tokens
        for size in _SHORT:
            if tokens <= size:
                return size
        step = 128 if tokens <= 1024 else 256
        return -(-tokens // step) * step

    def whole(self, tokens: int) -> int:
        """The largest such length that is not above `tokens`, for a chunk that is not the last."""
        if not self.recurring:
            return max(tokens // self.grain * self.grain, min(tokens, self.grain))
        if tokens < _SHORT[0]:
            return tokens
        if tokens < 256:
            return max(size for size in _SHORT if size <= tokens)
        step = 128 if tokens <= 1024 else 256
        return tokens // step * step

    def coarse(self, tokens: int) -> int:
        """The same from a set of few, for prompts with pictures: most of them are chunks that nothing
        like was run before, and every new length would be planned before each length of keys."""
        if not self.recurring:
            return self.whole(tokens)
        return max((size for size in _FEW if size <= tokens), default=tokens)

    def company(self, prompts: int) -> int:
        """How many of so many prompts run side by side."""
        return 1 << (prompts.bit_length() - 1) if self.recurring else prompts

    def rows(self, rows: int) -> int:
        """What a batch of so many rows is padded to."""
        if not self.recurring:
            return rows
        return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8

    def keys(self, tokens: int) -> int:
        """How many places of so many a step looks at, where there is a mask anyway."""
        step = 64 if self.recurring else 8
        return -(-tokens // step) * step

    def lengths(self, most: int) -> list[int]:
        """All lengths that a chunk of a fresh prompt may have, for a warm-up."""
        return sorted({self.length(n) for n in range(1, most + 1)})
