"""A row as it will be after some more tokens, for draws behind its draft tokens.

Penalties, grammar and thinking budget are copied and take the draft tokens: each place of a draft is drawn
from as it would be if the tokens before it had been drawn one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.grammar import RowGrammar
from millrace.engine.penalties import Penalties
from millrace.engine.row import Row
from millrace.engine.thinking_budget import ThinkingBudget
from millrace.protocol import Sampling, Submit


class Ahead:
    """A row after one more token."""

    def __init__(self, row: Row | Ahead, token: int) -> None:
        self.request: Submit = row.request
        self.sampling: Sampling = row.sampling
        self.seed: int = row.seed
        self.stop_ids: frozenset[int] = row.stop_ids
        self.generated: int = row.generated + 1
        self.forced: list[int] = row.forced[1:]
        self.tokens: list[int] = []
        """The tokens generated until then; only a thinking budget needs them."""
        self.penalties: Penalties | None = row.penalties and row.penalties.copy()
        self.grammar: RowGrammar | None = row.grammar and row.grammar.copy()
        self.thinking: ThinkingBudget | None = row.thinking and row.thinking.copy()
        if self.penalties is not None:
            self.penalties.accept(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.thinking is not None:
            self.tokens = [*row.tokens, token]
            if self.thinking.accept(self.tokens):
                self.forced = list(self.thinking.ending)

    @property
    def sound(self) -> bool:
        """Whether its draw is valid: its grammar has accepted the tokens and gave a mask."""
        return self.grammar is None or self.grammar.problem is None


def ahead_of(row: Row, draft: Sequence[int]) -> list[Ahead]:
    """The row after each of its draft tokens."""
    found: list[Ahead] = []
    last: Row | Ahead = row
    for token in draft:
        last = Ahead(last, token)
        found.append(last)
    return found
