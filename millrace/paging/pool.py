"""Which pages are free, and how many owners each of the others has. Pure: it holds numbers, no memory.

Owners are page tables of sequences and nodes of the prefix tree. A page is written by one sequence only,
behind what others know of it: a node keeps the tokens that were there when it came, and the sequence goes
on in the places after them. Whoever takes over a partly filled page copies it before writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TRASH = 0
"""The page that padding tokens write to. Nothing reads it, and it is never handed out."""

_ALL = 1 << 30


class OutOfPages(Exception):
    """More pages were asked for than are free."""


class PagePool:
    """Pages by number. A freed page is reused last-in first-out, so that a pool that is not full touches
    as little memory as it can."""

    def __init__(self, pages: int = 1) -> None:
        """`pages` include the trash page."""
        self._owners = [1]
        self._keepers = [0]
        """Of its owners, how many are nodes of the prefix tree."""
        self._known = [0]
        """How many of its places nodes know, from its first one on."""
        self._idle = 0
        """Pages that only nodes have."""
        self._free: list[int] = []
        self.grow(pages)

    def __len__(self) -> int:
        """Pages that there are, the trash page among them."""
        return len(self._owners)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self) - 1 - self.free

    @property
    def running(self) -> int:
        """Pages that sequences have, with those that nodes have as well."""
        return self.used - self._idle

    def grow(self, pages: int) -> None:
        """Have so many pages in all; the present ones keep their numbers."""
        new = range(len(self), pages)
        self._owners += [0] * len(new)
        self._keepers += [0] * len(new)
        self._known += [0] * len(new)
        self._free = [*reversed(new), *self._free]

    def shrink(self) -> int:
        """Give up free pages at the end; returns how many pages there are then."""
        while len(self._owners) > 1 and not self._owners[-1]:
            self._owners.pop()
            self._keepers.pop()
            self._known.pop()
        self._free = [page for page in self._free if page < len(self)]
        return len(self)

    def take(self, count: int) -> list[int]:
        """Pages with one owner: the caller."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page], self._known[page] = 1, 0
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Each of these gets one more sequence."""
        for page in pages:
            if not self._owners[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._idle -= not self.sequences(page)
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Each of these loses a sequence; the last owner's leaving frees the page."""
        for page in pages:
            if page == TRASH or not self.sequences(page):
                raise ValueError(f"page {page} has no sequence to lose")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
            else:
                self._idle += not self.sequences(page)

    def keep(self, pages: Sequence[int], last: int | None = None) -> None:
        """Each of these gets one more node of the prefix tree, which knows all its places, or `last` places
        of the last page where that is given."""
        for at, page in enumerate(pages, 1):
            if page == TRASH or not self._owners[page]:
                raise ValueError(f"page {page} is free and cannot be kept")
            self._owners[page] += 1
            self._keepers[page] += 1
            known = _ALL if last is None or at < len(pages) else last
            self._known[page] = max(self._known[page], known)

    def forget(self, pages: Iterable[int]) -> None:
        """Each of these loses a node; the last owner's leaving frees the page."""
        for page in pages:
            if not self._keepers[page]:
                raise ValueError(f"page {page} has no node to lose")
            self._owners[page] -= 1
            self._keepers[page] -= 1
            if not self._keepers[page]:
                self._known[page] = 0
            if not self._owners[page]:
                self._idle -= 1
                self._free.append(page)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def known(self, page: int) -> int:
        """How many of its places nodes know, from its first one on; it may be fewer by now."""
        return self._known[page]

    def sequences(self, page: int) -> int:
        """Of its owners, how many are sequences."""
        return self._owners[page] - self._keepers[page]

    def check(self) -> None:
        """Every invariant, for tests and idle moments."""
        free = set(self._free)
        assert len(free) == len(self._free) and TRASH not in free
        assert free == {page for page, owners in enumerate(self._owners) if not owners}
        kept = range(1, len(self))
        assert all(0 <= self._keepers[page] <= self._owners[page] for page in kept)
        idle = sum(1 for page in kept if self._owners[page] and not self.sequences(page))
        assert self._idle == idle
