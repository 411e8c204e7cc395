"""A row: one choice of one request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine.edits import Edits, wanted
from millrace.engine.guide import Guide, Guides
from millrace.engine.speculation import Guesser
from millrace.engine.thought import Thought
from millrace.protocol import Choice, FinishReason, Sampling, Submit


@dataclass(eq=False)
class Row:
    request: Submit
    choice: int
    seed: int
    tokens: list[int]
    """What it has made, before a resume included."""
    arrived: float = 0.0
    stop_ids: frozenset[int] = field(default=frozenset())
    edits: Edits | None = None
    guide: Guide | None = None
    thought: Thought | None = None
    forced: list[int] = field(default_factory=list)
    """Tokens that come next whatever the model says."""
    guesser: Guesser | None = None
    problem: str | None = None
    """Why this row cannot go on; the others can."""
    in_flight: bool = False
    """A token has been drawn for it on the device and not been read yet."""
    gone: bool = False
    """Finished or aborted: what is still in flight for it is thrown away."""

    @classmethod
    def of(cls, request: Submit, choice: Choice, now: float, guides: Guides | None = None) -> Row:
        edits = None
        if wanted(request.sampling):
            edits = Edits(request.sampling, request.prompt, choice.made, request.stop_ids)
        guide = guides.of(request, choice.made) if guides is not None else None
        thought = Thought(request.thinking, choice.made) if request.thinking else None
        return cls(
            request=request,
            choice=choice.index,
            seed=choice.seed,
            tokens=list(choice.made),
            arrived=now,
            stop_ids=frozenset(request.stop_ids),
            edits=edits,
            guide=guide,
            thought=thought,
            forced=thought.pending(choice.made) if thought else [],
        )

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def made(self) -> int:
        """The index of the next draw."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of context, prompt and made."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def spent(self) -> bool:
        """Whether the draw in flight is the last that the length allows."""
        return self.in_flight and self.made + 1 >= self.request.max_tokens

    @property
    def left(self) -> int:
        """Tokens that it may still make."""
        return self.request.max_tokens - self.made

    def context(self, start: int) -> list[int]:
        """Its tokens from `start` on, prompt and made."""
        prompt = self.request.prompt
        return [*prompt[start:], *self.tokens[max(0, start - len(prompt)) :]]

    @property
    def guessable(self) -> bool:
        """Whether later draws need nothing that the tokens before them change."""
        plain = self.edits is None and self.guide is None and self.thought is None
        return plain and self.request.logprobs is None

    def accept(self, token: int) -> FinishReason | None:
        """Take a drawn token; says whether the row ends with it."""
        self.in_flight = False
        self.tokens.append(token)
        if self.edits is not None:
            self.edits.accept(token)
        if token in self.stop_ids:
            return "stop"
        if self.guide is not None:
            self.problem = self.guide.accept(token)
            if self.guide.complete:
                return "complete"
        if self.thought is not None and self.thought.accept(self.tokens):
            self.forced = list(self.thought.ending)
        return "length" if self.made >= self.request.max_tokens else None


class Ahead:
    """A row as it will be some tokens later, for a draw that may turn out too early."""

    def __init__(self, row: Row, by: int) -> None:
        self.request = row.request
        self.sampling = row.sampling
        self.seed = row.seed
        self.stop_ids = row.stop_ids
        self.made = row.made + by
        self.edits = self.guide = self.thought = None
        self.forced: list[int] = []
