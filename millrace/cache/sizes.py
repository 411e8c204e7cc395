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
    page: int = 1
    """Tokens of a page; segments are whole pages."""

    def segment(self, start: int, end: int, *, own: bool = True) -> int:
        """Of a segment of the tokens start … end-1. If the page in which it begins is its `own`, the one
        before it ends in another."""
        pages = self._pages(end) - self._pages(start) + (own and start % self.page > 0)
        return self.per_token * self.page * pages

    def joined_own(self, start: int, middle: int, *, upper: bool, lower: bool) -> bool:
        """Whether the first page is its own of a segment that is joined of two, which meet at `middle`.
        Where the upper one ends within its first page, the lower one's page takes its place."""
        return upper or (lower and start // self.page == middle // self.page)

    def fitting(self, start: int, tokens: int, room: int, each: int) -> int:
        """How many of these tokens, behind `start` others, have a segment within `room` bytes, where each
        token takes `each` more."""
        if self.segment(start, start + tokens) + each * tokens <= room:
            return tokens
        pages = room // (self.page * (self.per_token + each)) - (start % self.page > 0)
        if pages < 0:
            return 0
        return min(tokens, (self._pages(start) + pages) * self.page - start)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def checkpoint(self, at: int) -> int:
        """Of a checkpoint after `at` tokens."""
        return self.flat + sum(
            w.per_token * (at if w.most is None else min(at, w.most)) for w in self.windows
        )
