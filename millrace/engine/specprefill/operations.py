"""What the draft is to do in a turn, and what came of it, as plain data."""

from __future__ import annotations

import msgspec

from millrace.cache.operations import AnyOperation, Operation
from millrace.protocol.specprefill import Ranges


class BeginScoring(Operation, frozen=True):
    """The draft is going to look at the prompt of this row's request."""

    prefill: int
    """A number of the draft's own."""
    row: int


class ScoreChunk(Operation, frozen=True):
    """Run the draft on this many more of a prompt's tokens."""

    prefill: int
    count: int
    wait: bool = False


class LookAhead(Operation, frozen=True):
    """Let the draft go on by so many tokens, and note what of the prompt it looks at."""

    prefill: int
    steps: int
    wait: bool = False


class ChooseTokens(Operation, frozen=True):
    """Say what of a prompt stays, of which the state of `known` tokens is there."""

    prefill: int
    known: int
    window: int


class EndScoring(Operation, frozen=True):
    """The draft lets go of a prompt."""

    prefill: int


class DraftCache(Operation, frozen=True):
    """Something for the draft's own prefix cache."""

    operation: AnyOperation


ScoringOperation = BeginScoring | ScoreChunk | LookAhead | ChooseTokens | EndScoring | DraftCache


class ScoringResult(msgspec.Struct):
    """What came of the draft's work in a turn."""

    prefill: int
    seconds: float | None = None
    """What it took, where the host waited for it."""
    kept: Ranges | None = None
    """What stays, if that was chosen."""
    problem: str | None = None
