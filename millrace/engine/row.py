"""A row: one choice of one request while tokens are drawn for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine.grammar import Grammars, RowGrammar
from millrace.engine.penalties import Penalties, wanted
from millrace.engine.thinking_budget import ThinkingBudget
from millrace.protocol import Choice, FinishReason, Sampling, Submit


@dataclass(eq=False)
class Row:
    number: int
    request: Submit
    choice: int
    seed: int
    tokens: list[int]
    """What it has generated, before a resume included."""
    stop_ids: frozenset[int] = field(default=frozenset())
    penalties: Penalties | None = None
    grammar: RowGrammar | None = None
    thinking: ThinkingBudget | None = None
    forced: list[int] = field(default_factory=list)
    """Tokens that come next whatever the model says."""
    problem: str | None = None
    """Why this row cannot go on; the others can."""
    ended: bool = False
    """What is still drawn for it is thrown away."""

    @classmethod
    def of(
        cls, request: Submit, choice: Choice, number: int = 0, grammars: Grammars | None = None
    ) -> Row:
        penalties = None
        if wanted(request.sampling):
            penalties = Penalties(
                request.sampling, request.prompt, choice.generated, request.stop_ids
            )
        grammar = grammars.of(request, choice.generated) if grammars is not None else None
        thinking = ThinkingBudget(request.thinking, choice.generated) if request.thinking else None
        return cls(
            number=number,
            request=request,
            choice=choice.index,
            seed=choice.seed,
            tokens=list(choice.generated),
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
    def generated(self) -> int:
        """The index of the next draw."""
        return len(self.tokens)

    def accept(self, token: int) -> FinishReason | None:
        """Take a drawn token; says whether the row ends with it."""
        self.tokens.append(token)
        if self.forced:
            self.forced.pop(0)
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
