"""Where the tokens of a prompt with pictures stand, where a token is placed by time, height and width.

Text moves all three by one; a picture's tokens share their time and differ by row and column, and what
follows it goes on after the largest of the three. Pure numbers: they follow from the request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.protocol import Span


@dataclass(frozen=True)
class Placement:
    """Of every token of a prompt."""

    at: np.ndarray[Any, np.dtype[np.int32]]
    """Shaped (3, tokens)."""
    delta: int
    """What a token after them stands before its place in the row: place + delta is its position."""


def placed(length: int, spans: Sequence[Span], merge: int) -> Placement:
    """Raises ValueError where a picture's grid does not fit its place."""
    at = np.empty((3, length), np.int32)
    done = following = 0
    for span in spans:
        grid = _merged(span, merge)
        text = span.start - done
        at[:, done : span.start] = following + np.arange(text)
        following += text
        where = np.indices(grid, dtype=np.int32).reshape(3, -1)
        done = span.start + span.length
        at[:, span.start : done] = following + where
        following += max(grid)
    at[:, done:] = following + np.arange(length - done)
    return Placement(at, following - done)


def _merged(span: Span, merge: int) -> tuple[int, int, int]:
    if len(span.grid) != 3 or min(span.grid) < 1:
        raise ValueError("A picture came without its grid of patches.")
    frames, height, width = span.grid
    grid = frames, height // merge, width // merge
    if grid[0] * grid[1] * grid[2] != span.length:
        raise ValueError(
            f"A picture's grid of {frames} × {height} × {width} patches does not give the {span.length} "
            "tokens it has in the prompt."
        )
    return grid
