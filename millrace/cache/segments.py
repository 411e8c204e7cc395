"""Segments: the keys and values of a run of tokens in the layers that can be cut.

A store keeps one segment for each node. Either they are copies, which may be packed in eight bits
(`CopiedSegments`), or they are the pages in which sequences run (`engine/page_segments.py`), which are
shared and not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from millrace.cache.payload import Payload
from millrace.cache.state import (
    KVSegment,
    Layout,
    StateCheckpoint,
    joined,
    restore_segments,
    segment_from,
    segment_of,
    segment_payload,
)


class StateSource(Protocol):
    """Whose state is to be kept: a sequence of a runner."""

    def pairs(self, start: int, end: int) -> list[tuple[mx.array, mx.array]]:
        """Copies of the keys and values of the tokens start … end-1, by layer that can be cut."""

    def pages(self, start: int, end: int) -> list[int]:
        """The pages of these tokens, which one more node has from now on."""

    def checkpoint(self) -> StateCheckpoint:
        """The layers that cannot be cut, as they are now."""


class Segment(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of it."""


S = TypeVar("S", bound=Segment)


class Segments(Protocol, Generic[S]):
    """What a store does with segments. A segment that is cut, joined or released is used no more."""

    def keep(self, source: StateSource, start: int, end: int) -> S:
        """The segment of the source's tokens start … end-1."""

    def cut(self, segment: S, at: int) -> tuple[S, S]:
        """Its first `at` tokens, and the others."""

    def join(self, upper: S, lower: S) -> S:
        """Two that follow each other as one."""

    def release(self, segment: S) -> None:
        """Give up its memory."""

    def restore(
        self, caches: list[Any], layout: Layout, segments: Sequence[S], at: int
    ) -> list[int] | None:
        """Give a sequence's empty caches the first `at` tokens of segments that follow each other, or
        return the pages in which these lie."""

    def payload(self, segment: S) -> Payload:
        """As plain arrays, for the disk; waits for the device."""

    def load(self, payload: Payload, start: int, parent: S | None) -> S:
        """What was written to disk, behind `start` tokens, of which the parent has the last."""


class CopiedSegments:
    """Segments with arrays of their own."""

    def __init__(self, *, pack: bool = False) -> None:
        """`pack` stores them in eight bits."""
        self._pack = pack

    def keep(self, source: StateSource, start: int, end: int) -> KVSegment:
        segment = segment_of(source.pairs(start, end), end - start, self._pack)
        mx.async_eval(segment.arrays)
        return segment

    def cut(self, segment: KVSegment, at: int) -> tuple[KVSegment, KVSegment]:
        return segment.cut(0, at), segment.cut(at, segment.length)

    def join(self, upper: KVSegment, lower: KVSegment) -> KVSegment:
        return joined([upper, lower])

    def release(self, segment: KVSegment) -> None:
        """Its arrays go with it."""

    def restore(
        self, caches: list[Any], layout: Layout, segments: Sequence[KVSegment], at: int
    ) -> list[int] | None:
        restore_segments(caches, layout, segments, at)
        return None

    def payload(self, segment: KVSegment) -> Payload:
        return segment_payload(segment)

    def load(self, payload: Payload, start: int, parent: KVSegment | None) -> KVSegment:
        return segment_from(payload)
