"""A prompt that is being run, as far as the executor knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine.sights import View
from millrace.engine.specprefill.selection import Kept
from millrace.protocol import Submit, TokenLogprob


@dataclass
class Prompt:
    request: Submit
    tokens: list[int]
    width: int
    """Places for its tokens."""
    scored: int | None
    """How many alternatives its own tokens are reported with; None if nobody asked."""
    view: View | None = None
    """Where its pictures are, if it has any."""
    kept: Kept | None = None
    """What its tokens are of the request's prompt, where some were left out."""
    done: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def delta(self) -> int:
        """What positions after it are beyond places."""
        if self.kept is not None:
            return self.kept.dropped
        return self.view.delta if self.view else 0
