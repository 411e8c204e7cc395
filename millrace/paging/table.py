"""The pages of one sequence, in the order of its tokens. Pure.

A table may share its first pages with others. It grows by pages of its own, gives up the pages behind a
sliding window, and is cut back when draft tokens were wrong. What must be copied on the device is returned
as a `PageCopy`: at most the one partly filled page in which two sequences part.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from millrace.paging.pool import TRASH, PagePool


class PageCopy(NamedTuple):
    """The first `tokens` places of a page are copied to another page."""

    source: int
    target: int
    tokens: int


class PageTable:
    def __init__(self, pool: PagePool, page: int, window: int | None = None) -> None:
        """`page` is how many tokens a page holds. With a `window`, a token sees so many keys, itself
        among them, and pages that no later token sees are given up."""
        self._pool = pool
        self._page = page
        self._window = window
        self.pages: list[int] = []
        """By place; TRASH where a page was given up."""
        self.length = 0
        """Tokens that have been written or are about to be."""
        self._first = 0
        """Pages before this one were given up."""

    @property
    def own(self) -> list[int]:
        """Pages that it holds."""
        return self.pages[self._first :]

    def lacks(self, tokens: int) -> int:
        """Pages that it must take to have room for so many more tokens."""
        return max(0, -(-(self.length + tokens) // self._page) - len(self.pages))

    def extend(self, tokens: int) -> None:
        """Have room for so many more tokens, which are written now. Raises OutOfPages, and changes nothing
        then."""
        self.pages += self._pool.take(self.lacks(tokens))
        self.length += tokens

    def pass_window(self, drafts: int = 0) -> None:
        """Give up the pages that no token from the present end on sees, nor one in the place of the last
        `drafts` tokens."""
        if self._window is None:
            return
        length = self.length - drafts
        last = min((length - self._window + 1) // self._page, len(self.pages))
        if last > self._first:
            self._pool.release(self.pages[self._first : last])
            self.pages[self._first : last] = [TRASH] * (last - self._first)
            self._first = last

    def cut(self, length: int) -> PageCopy | None:
        """Keep the first `length` tokens. If others know more of the last page than what stays in it, it is
        replaced by a copy, since tokens will be written behind those that are kept."""
        if length > self.length:
            raise ValueError(f"{length} tokens cannot be kept of {self.length}")
        keep = -(-length // self._page)
        if not self._holds(length):
            raise ValueError(f"pages that token {length} sees were given up")
        copy = self._unshared(length) if self.copies_at(length) else None
        self._pool.release(self.pages[max(keep, self._first) :])
        del self.pages[keep:]
        self.length = length
        return self._replace(copy)

    def fork(self, length: int | None = None) -> tuple[Self, PageCopy | None]:
        """Another table with the first `length` tokens (all, by default) on the same pages, and the copy
        that its last page needs before it is written to."""
        other = type(self)(self._pool, self._page, self._window)
        length = self.length if length is None else length
        keep = -(-length // self._page)
        if length > self.length or not self._holds(length):
            raise ValueError(f"pages that token {length} sees are not in the table")
        other.pages = self.pages[:keep]
        other._first = self._first
        other.length = length
        self._pool.share(other.own)
        try:
            return other, other._replace(other._unshared(length))
        except Exception:
            other.release()
            raise

    def adopt(self, pages: list[int], length: int) -> PageCopy | None:
        """Begin with pages of others, which hold `length` tokens: those of the prefix tree. TRASH stands
        for pages behind the window."""
        if self.pages:
            raise ValueError("only an empty table can begin with pages of others")
        first = next((i for i, page in enumerate(pages) if page != TRASH), len(pages))
        self._pool.share(pages[first:])
        self.pages, self.length, self._first = list(pages), length, first
        try:
            return self._replace(self._unshared(length))
        except Exception:
            self.release()
            raise

    def release(self) -> None:
        """Give up all pages."""
        self._pool.release(self.own)
        self.pages, self.length, self._first = [], 0, 0

    def keep(self, begin: int, end: int) -> list[int]:
        """The pages of the tokens begin … end-1, for a node of the prefix tree, which is an owner of them
        from now on."""
        if end > self.length or begin // self._page < self._first:
            raise ValueError(f"tokens {begin} to {end} are not in the table")
        pages = self.pages[begin // self._page : -(-end // self._page)]
        self._pool.keep(pages, end % self._page or None)
        return pages

    def copies_at(self, length: int) -> bool:
        """Whether a cut to this length copies the page in which it ends."""
        last, filled = divmod(length, self._page)
        if not filled or not self._first <= last < len(self.pages):
            return False
        page = self.pages[last]
        return self._pool.sequences(page) > 1 or self._pool.known(page) > filled

    def _holds(self, length: int) -> bool:
        """Whether all that the token behind the first `length` sees is there."""
        seen = 0 if self._window is None else max(0, length - self._window + 1)
        return seen // self._page >= self._first

    def _unshared(self, length: int) -> PageCopy | None:
        """The copy that the page of token `length` needs before it is written to, with a page taken for
        it; raises OutOfPages before anything is changed."""
        last, filled = divmod(length, self._page)
        if not filled or last < self._first or self._pool.owners(self.pages[last]) == 1:
            return None
        (page,) = self._pool.take(1)
        return PageCopy(self.pages[last], page, filled)

    def _replace(self, copy: PageCopy | None) -> PageCopy | None:
        if copy is not None:
            self._pool.release([copy.source])
            self.pages[-1] = copy.target
        return copy
