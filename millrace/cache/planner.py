"""Where a prompt can go on from: what each kind of layer can restore, and where they all agree.

Pure: it knows positions only. Layers whose state can be cut restore at any known token. Layers whose
state cannot be cut restore at checkpoints; a sliding window that has not wrapped yet can be cut too,
so a checkpoint further on serves as well while it is within the window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layers:
    """What a model's layers need."""

    uncut: bool
    """Some layer's state cannot be cut."""
    window: int | None = None
    """All of those are sliding windows of at least this many tokens: until then they can be cut."""


@dataclass(frozen=True)
class RestorePlan:
    at: int
    """Tokens whose state is restored."""
    checkpoint: int | None = None
    """The position of the checkpoint to restore from; beyond `at` it is cut back to it."""


NOTHING = RestorePlan(0)


def plan(
    layers: Layers, known: int, limit: int, passed: Iterable[int], ahead: Iterable[int] = ()
) -> RestorePlan:
    """The best place to go on from.

    `known` tokens of the prompt are in the tree and at most `limit` may be restored (one token is
    always left to run). `passed` are the checkpoints among the known tokens, `ahead` those of longer
    runs that begin with all of them.
    """
    most = min(known, limit)
    if not layers.uncut:
        return RestorePlan(most)
    best = max((p for p in passed if p <= most), default=0)
    if layers.window is not None and best < most:
        further = [p for p in (*passed, *ahead) if most <= p < layers.window]
        if further:
            return RestorePlan(most, min(further))
    return RestorePlan(best, best) if best else NOTHING
