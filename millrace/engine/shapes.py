"""How many tokens a pass has. On a GPU a new shape costs a plan, a compile or a captured graph, so that
passes there are padded to a few sizes; a CPU computes nothing that is not needed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Each is at most half as large again as the one before, from 16 tokens on."""


@dataclass(frozen=True)
class Shapes:
    recurring: bool = False
    """Whether sizes come from a small set."""

    def tokens(self, count: int) -> int:
        """What a pass of this many tokens is padded to."""
        if not self.recurring:
            return count
        last = _SIZES[-1]
        return next((size for size in _SIZES if size >= count), -(-count // last) * last)

    def sizes(self, most: int) -> list[int]:
        """All sizes of passes of up to this many tokens, for a warm-up."""
        return sorted({self.tokens(n) for n in (*_SIZES, most) if n <= most})
