"""How the sequences of a step may be put together."""

from __future__ import annotations

import enum


class Batching(enum.Enum):
    """From what asks most of a model to what asks least."""

    FLAT = "flat"
    """All tokens of all sequences in one pass."""
    ROWS = "rows"
    """A prompt is one pass; sequences with one token each are another."""
    SINGLE = "single"
    """Every sequence is a pass."""
