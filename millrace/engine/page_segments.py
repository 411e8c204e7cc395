"""Segments of the prefix cache that are the pages in which sequences run: nothing is copied.

A segment begins and ends within pages. The page in which it ends may be the one in which the next begins:
then both are owners of it. Otherwise the next one's holds all that stands before it in that page as well:
of two pages for the same place, the later segment's is the one to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from millrace.cache.payload import Payload
from millrace.cache.segments import StateSource
from millrace.cache.state import KVSegment, Layout, segment_from, segment_of, segment_payload
from millrace.paging.pool import PagePool
from millrace.paging.table import PageCopy


@dataclass(eq=False)
class PageSegment:
    pages: list[int]
    start: int
    length: int
    own: bool
    """Whether its first page counts as its own though tokens before it lie there: as in the index."""
    page: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return (len(self.pages) - (self.start % self.page > 0 and not self.own)) * self.page_bytes


class PagedLayers(Protocol):
    """The layers whose pages these are."""

    page: int

    def page_bytes(self, group: int) -> int: ...

    def copy_page(self, copy: PageCopy, group: int) -> None: ...

    def read(
        self, layer: int, pages: Sequence[int], begin: int, end: int
    ) -> tuple[mx.array, mx.array]: ...

    def write(
        self, layer: int, pages: Sequence[int], begin: int, keys: mx.array, values: mx.array
    ) -> None: ...


class PageSegments:
    def __init__(
        self,
        layers: PagedLayers,
        layout: Layout,
        pool: PagePool,
        group: int,
        reserve: Callable[[int], None],
    ) -> None:
        """`pool` and `group` are those of the layers that look at all keys; `reserve` has so many pages
        free there."""
        self._layers = layers
        self._layout = layout
        self._pool = pool
        self._group = group
        self._reserve = reserve

    def keep(self, source: StateSource, start: int, end: int) -> PageSegment:
        return self._segment(source.pages(start, end), start, end - start, own=True)

    def cut(self, segment: PageSegment, at: int) -> tuple[PageSegment, PageSegment]:
        page, middle = self._layers.page, segment.start + at
        first = middle // page - segment.start // page
        shared = middle % page > 0
        if shared:
            self._pool.keep([segment.pages[first]], 0)
        upper, lower = segment.pages[: first + shared], segment.pages[first:]
        return (
            self._segment(upper, segment.start, at, own=segment.own),
            self._segment(lower, middle, segment.length - at, own=False),
        )

    def join(self, upper: PageSegment, lower: PageSegment) -> PageSegment:
        pages, page = list(upper.pages), self._layers.page
        if lower.start % page:
            self._pool.forget([pages.pop()])
        # Where the upper one ends within its first page, the lower one's has taken its place.
        own = upper.own or (lower.own and upper.start // page == lower.start // page)
        return self._segment(pages + lower.pages, upper.start, upper.length + lower.length, own=own)

    def release(self, segment: PageSegment) -> None:
        self._pool.forget(segment.pages)

    def restore(
        self, caches: list[Any], layout: Layout, segments: Sequence[PageSegment], at: int
    ) -> list[int] | None:
        page = self._layers.page
        pages: list[int] = []
        for segment in segments:
            if segment.start < at:
                pages[segment.start // page :] = segment.pages
        return pages[: -(-at // page)]

    def payload(self, segment: PageSegment) -> Payload:
        begin = segment.start % self._layers.page
        end = begin + segment.length
        pairs = [
            self._layers.read(layer, segment.pages, begin, end) for layer in self._layout.cuttable
        ]
        return segment_payload(segment_of(pairs, segment.length, pack=False))

    def load(self, payload: Payload, start: int, parent: PageSegment | None) -> PageSegment:
        found = segment_from(payload)
        page = self._layers.page
        count = -(-(start + found.length) // page) - start // page
        self._reserve(count)
        pages = self._pool.take(count)
        self._pool.keep(pages, (start + found.length) % page or None)
        self._pool.release(pages)
        if start % page:
            assert parent is not None
            copy = PageCopy(parent.pages[-1], pages[0], start % page)
            self._layers.copy_page(copy, self._group)
        for layer, (keys, values) in zip(self._layout.cuttable, _pairs(found), strict=True):
            self._layers.write(layer, pages, start % page, keys, values)
        return self._segment(pages, start, found.length, own=True)

    def _segment(self, pages: list[int], start: int, length: int, *, own: bool) -> PageSegment:
        each = self._layers.page_bytes(self._group)
        return PageSegment(pages, start, length, own, self._layers.page, each)


def _pairs(segment: KVSegment) -> list[tuple[mx.array, mx.array]]:
    return list(zip(segment.arrays[::2], segment.arrays[1::2], strict=True))
