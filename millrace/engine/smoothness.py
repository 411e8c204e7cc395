"""How long the gap between two tokens of a stream may become for the sake of others. Pure.

As long as steps are short, some steps' worth of other work is hardly seen. What takes much longer
than a quarter of a second is, so there the share that others get becomes smaller; but never nothing.
"""

from __future__ import annotations

GAP_IN_STEPS = 2.5
"""Steps that a gap may take as long as they are short."""
LEAST_GAP_IN_STEPS = 1.5
"""The same where a step alone is seen."""
CALM_STEPS = 1.7
"""Steps as streams know them that one with guesses may take when all is quiet: where cores are few, what
else needs one for a moment makes it nearly twice as long."""
UNSEEN = 0.28
"""Seconds of a gap that few notice."""
UNSEEN_STEP = 0.2
"""The same of a step by itself: a chunk may come beside it."""
_SHORTER_SINCE, _LONGER_SINCE = 8.0, 60.0
"""Seconds in which streams get used to steps that have become shorter, and longer."""
_CLEARLY, _AT_ONCE = 0.75, 0.1
"""How much shorter a step is that no luck makes so short, and how fast that counts."""


def used_to(before: float, seconds: float) -> float:
    """What streams are used to after a step that took so long, one as long as `before` until then."""
    weight = min(1.0, seconds / (_SHORTER_SINCE if seconds < before else _LONGER_SINCE))
    if seconds < _CLEARLY * before:
        weight = max(weight, _AT_ONCE)
    return before + weight * (min(seconds, 2 * before) - before)


def longest_gap(step: float) -> float:
    """What a gap may take, with other work in it, where a step takes so long."""
    return max(min(GAP_IN_STEPS * step, UNSEEN), LEAST_GAP_IN_STEPS * step)


def longest_step(step: float) -> float:
    """What a step may take with guesses, where one without takes so long."""
    return max(min(GAP_IN_STEPS * step, UNSEEN_STEP), LEAST_GAP_IN_STEPS * step)
