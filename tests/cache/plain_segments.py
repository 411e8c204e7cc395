"""Segments of plain caches, as a runner's sequence gives them from pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from millrace.cache.state import KVSegment, Layout, segment_of


def from_caches(
    layout: Layout, caches: Sequence[Any], start: int, end: int, pack: bool
) -> KVSegment:
    """The segment of the tokens start … end-1 of a single row."""
    return segment_of(pairs_of(layout, caches, start, end), end - start, pack)


def pairs_of(
    layout: Layout, caches: Sequence[Any], start: int, end: int
) -> list[tuple[mx.array, mx.array]]:
    """Their keys and values, by layer that can be cut."""
    return [
        (caches[i].keys[:, :, start:end], caches[i].values[:, :, start:end])
        for i in layout.cuttable
    ]
