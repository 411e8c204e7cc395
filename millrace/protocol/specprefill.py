"""What front and engine tell each other of SpecPrefill: what a request may leave out of its prompt, and
what was chosen.
"""

from __future__ import annotations

import msgspec

Ranges = list[tuple[int, int]]
"""Runs of a prompt's tokens, first … end-1 each, in order and apart from one another."""


class SparsePrefill(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt of which the less important tokens may be left out."""

    keep: float
    """The share of what lies between head and tail that stays, above 0 and at most 1."""
    head: int = 0
    """Tokens up to the end of the system prompt and the tools: all of them stay."""
    tail: int | None = None
    """Where the last message begins, from which on all stays; None where there are no messages."""
    least: int = 0
    """Tokens that must be left to run for it to be worth while; 0 where the request asks for it."""
    kept: Ranges | None = None
    """What was chosen before a resume."""


class Selected(msgspec.Struct, array_like=True):
    """What of a prompt stays. The front sends it again after a resume."""

    id: int
    kept: Ranges
    scored: int
    """Tokens that the draft has looked at, to choose."""
    run: int
    """Those of them that it had to run: the others' state it knew."""
    seconds: float
    """What all of that took."""


class Scoring(msgspec.Struct, array_like=True):
    """How far the draft is with a prompt."""

    id: int
    done: int
    total: int
