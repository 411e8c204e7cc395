"""How many bytes a model's state takes, so that memory can be counted without looking at arrays."""

from __future__ import annotations

import msgspec


class Window(msgspec.Struct, frozen=True, array_like=True):
    """A part of a checkpoint that grows with the tokens behind it, up to so many."""

    per_token: int
    most: int | None = None


class StateSizes(msgspec.Struct, frozen=True):
    """Measured once, when the model is loaded (`state.sizes_of`)."""

    per_token: int
    """Of a segment, packed if the cache packs; 0 where no layer can be cut."""
    flat: int = 0
    """What every checkpoint has, however many tokens are behind it."""
    windows: tuple[Window, ...] = ()

    def segment(self, tokens: int) -> int:
        return self.per_token * tokens

    def checkpoint(self, at: int) -> int:
        """Of a checkpoint after `at` tokens."""
        return self.flat + sum(
            w.per_token * (at if w.most is None else min(at, w.most)) for w in self.windows
        )
