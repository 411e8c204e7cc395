"""A row: one choice of one request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine.grammar import Grammars, RowGrammar
from millrace.engine.penalties import Penalties, wanted
from millrace.engine.speculation import Guesser
from millrace.engine.thinking_budget import ThinkingBudget
from millrace.protocol import Choice, FinishReason, Sampling, Submit


@dataclass(eq=False)
class Row:
    request: Submit
    choice: int
    seed: int
    tokens: list[int]
    """What it has generated, before a resume included."""
    arrived: float = 0.0
    stop_ids: frozenset[int] = field(default=frozenset())
    penalties: Penalties | None = None
    grammar: RowGrammar | None = None
    thinking: ThinkingBudget | None = None
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
    def of(
        cls, request: Submit, choice: Choice, now: float, grammars: Grammars | None = None
    ) -> Row:
        penalties = None
        if wanted(request.sampling):
            penalties = Penalties(
                request.sampling, request.prompt, choice.generated, request.stop_ids
            )
        grammar = grammars.of(request, choice.generated) if grammars is not None else None
        thinking = ThinkingBudget(request.thinking, choice.generated) if request.thinking else None
        return cls(
            request=request,
            choice=choice.index,
            seed=choice.seed,
            tokens=list(choice.generated),
            arrived=now,
            stop_ids=frozenset(request.stop_ids),
            penalties=penalties,
            grammar=grammar,
            thinking=thinking,
            forced=thinking.pending(choice.generated) if thinking else [],
        )

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def generated(self) -> int:
        """The index of the next draw."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of context, prompt and generated."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def spent(self) -> bool:
        """Whether the draw in flight is the last that the length allows."""
        return self.in_flight and self.generated + 1 >= self.request.max_tokens

    @property
    def left(self) -> int:
        """Tokens that it may still make."""
        return self.request.max_tokens - self.generated

    def context(self, start: int) -> list[int]:
        """Its tokens from `start` on, prompt and generated."""
        prompt = self.request.prompt
        return [*prompt[start:], *self.tokens[max(0, start - len(prompt)) :]]

    @property
    def guessable(self) -> bool:
        """Whether later draws need nothing that the tokens before them change."""
        plain = self.penalties is None and self.grammar is None and self.thinking is None
        return plain and self.request.logprobs is None

    def accept(self, token: int) -> FinishReason | None:
        """Take a drawn token; says whether the row ends with it."""
        self.in_flight = False
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.accept(token)
        if token in self.stop_ids:
            return "stop"
        if self.grammar is not None:
            self.problem = self.grammar.accept(token)
            if self.grammar.complete:
                return "complete"
        if self.thinking is not None and self.thinking.accept(self.tokens):
            self.forced = list(self.thinking.ending)
        return "length" if self.generated >= self.request.max_tokens else None


class Ahead:
    """A row as it will be some tokens later, for a draw that may turn out too early."""

    def __init__(self, row: Row, by: int) -> None:
        self.request = row.request
        self.sampling = row.sampling
        self.seed = row.seed
        self.stop_ids = row.stop_ids
        self.generated = row.generated + by
        self.penalties = self.grammar = self.thinking = None
        self.forced: list[int] = []
