"""A prompt that is being run, as far as the executor knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine.specprefill.selection import Kept
from millrace.engine.vision_inputs import PromptPictures
from millrace.protocol import Submit, TokenLogprob


@dataclass
class Prompt:
    request: Submit
    tokens: list[int]
    scored: int | None
    """How many alternatives its own tokens are reported with; None if nobody asked."""
    view: PromptPictures | None = None
    """Where its pictures are, if it has any."""
    kept: Kept | None = None
    """What its tokens are of the request's prompt, where some were left out."""
    done: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def apart(self) -> bool:
        """Whether it runs by itself: its own logits, pictures or positions of its tokens are asked for, or
        an engine died while it ran this request."""
        own_pass = self.scored is not None or self.view is not None or self.kept is not None
        return own_pass or self.request.apart

    @property
    def shift(self) -> int:
        """By how much positions after it are beyond places."""
        if self.kept is not None:
            return self.kept.dropped
        return self.view.delta if self.view else 0

    def next(self, count: int) -> list[int]:
        """Its next tokens; the last one of all is left to the batch."""
        return self.tokens[self.done : min(self.done + count, len(self.tokens) - 1)]

    def positions(self, begin: int, end: int) -> list[int] | None:
        """Where some of its tokens stand; None if at their places."""
        if self.kept is None or end <= self.kept.exact:
            return None
        return self.kept.positions(begin, end)
