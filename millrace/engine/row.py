"""A row: one choice of one request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.protocol import Choice, FinishReason, Sampling, Submit


@dataclass(eq=False)
class Row:
    request: Submit
    choice: int
    seed: int
    made: int
    """Tokens drawn so far, those before a resume included: the index of the next draw."""
    length: int
    """Tokens of context, prompt and made."""
    stop_ids: frozenset[int] = field(default=frozenset())
    in_flight: bool = False
    """A token has been drawn for it on the device and not been read yet."""
    gone: bool = False
    """Finished or aborted: what is still in flight for it is thrown away."""

    @classmethod
    def of(cls, request: Submit, choice: Choice) -> Row:
        return cls(
            request=request,
            choice=choice.index,
            seed=choice.seed,
            made=len(choice.made),
            length=len(request.prompt) + len(choice.made),
            stop_ids=frozenset(request.stop_ids),
        )

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def spent(self) -> bool:
        """Whether the draw in flight is the last that the length allows."""
        return self.in_flight and self.made + 1 >= self.request.max_tokens

    def accept(self, token: int) -> FinishReason | None:
        """Take a drawn token; says whether the row ends with it."""
        self.in_flight = False
        self.made += 1
        self.length += 1
        if token in self.stop_ids:
            return "stop"
        return "length" if self.made >= self.request.max_tokens else None
