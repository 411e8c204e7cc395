"""What the decider knows of the work: prompts on their way into the batch, and rows in it.

Plain values only. The state that belongs to them lies with the executor, under the same numbers.
"""

from __future__ import annotations

import enum
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.engine.specprefill.selection import Kept
from millrace.engine.speculation import Drafter
from millrace.protocol import Choice, Prefilled, Submit
from millrace.protocol.prefixes import HitKind

ALIKE = 64
"""Prompts with this many tokens in common are not run side by side."""
NO_GROUP = 0
PRIORITY_SECONDS = 30.0
"""How much waiting one step of priority is worth."""


class Phase(enum.Enum):
    """Where a row is. It moves downwards only, except that a row that had to leave queues again."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    LEFT = enum.auto()
    """Out of the batch, with a token drawn that has not been read."""
    ENDED = enum.auto()


class Stage(enum.Enum):
    """Where a prompt is."""

    WAITING = enum.auto()
    STARTED = enum.auto()
    """Run in part, and holding memory."""
    READY = enum.auto()
    """Run to its last token, which the batch runs."""
    OVER = enum.auto()


@dataclass(eq=False)
class Sequence:
    """One choice of a request, as far as scheduling goes."""

    number: int
    request: Submit
    choice: int
    tokens: list[int]
    """What it has generated, before a resume included."""
    arrived: float
    keys: list[int] = field(default_factory=list)
    """Its prompt as the prefix cache knows it, without what is left out."""
    kept: Kept | None = None
    """What stays of its prompt, where some is left out."""
    phase: Phase = Phase.QUEUED
    held: int = 0
    """Tokens whose state it holds in the batch."""
    unread: int = 0
    """Draws that the host has not read."""
    group: int = NO_GROUP
    """Rows that are held apart from others while a fault is traced."""
    drafter: Drafter | None = None
    most: int = 0
    """Tokens that it may generate in all."""

    def __post_init__(self) -> None:
        self.most = self.most or self.request.max_tokens

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def width(self) -> int:
        """Rows that it takes."""
        return 1

    @property
    def length(self) -> int:
        """Tokens of context that have state, prompt and generated, as far as they are known."""
        dropped = self.kept.dropped if self.kept is not None else 0
        return len(self.request.prompt) - dropped + len(self.tokens)

    @property
    def spent(self) -> bool:
        """Whether the draw that is not read yet is the last that its length allows."""
        return bool(self.unread) and len(self.tokens) + self.unread >= self.most

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.most - len(self.tokens)

    def context(self, start: int) -> list[int]:
        """Its tokens from `start` on, prompt and generated."""
        prompt = self.request.prompt
        return [*prompt[start:], *self.tokens[max(0, start - len(prompt)) :]]

    @property
    def draftable(self) -> bool:
        """Whether it may try draft tokens. With some kernels the last digits of logprobs depend on how many
        tokens a pass has, and a request that runs alone reports the same logprobs each time."""
        return self.request.logprobs is None


@dataclass(eq=False)
class Prefill:
    """A prompt: the rows that continue one and the same run of tokens."""

    number: int
    request: Submit
    sequences: list[Sequence]
    tokens: list[int]
    """As the prefix cache knows them."""
    arrived: float
    stage: Stage = Stage.WAITING
    done: int = 0
    """Tokens whose state is there."""
    known: int = 0
    """Tokens whose state is expected to be found when it starts."""
    cached: int = 0
    hit: HitKind = "none"
    written: int = 0
    """Prompt tokens that were run here and are kept for others."""
    ticket: int | None = None
    """State that was asked for on its behalf from disk."""
    blocked: bool = False
    """That state is still on its way."""
    pauses: list[int] = field(default_factory=list)
    """Places where state that cannot be cut is to be kept, so that a chunk must end there."""
    demoted: bool = False
    """It was under way before: what it finds again is its own."""
    promised: bool = False
    """Others gave way to it: until it has started it goes before all that wait, or they would take the room
    back."""
    quiet: bool = False
    """Others of its request's rows run the same prompt: what it finds of theirs was not found by
    the request, and is not reported as such."""
    visible: int = 0
    """Tokens that it can run to with the pictures that have been encoded."""
    blind: bool = False
    """It cannot go on before a picture has been encoded."""
    unscored: bool = False
    """What stays of it has not been chosen yet."""
    missed: set[str] = field(default_factory=set)
    """Pictures that it had to wait for, or was told to have found."""

    def __post_init__(self) -> None:
        self.visible = len(self.tokens)

    @property
    def waits(self) -> bool:
        """Whether what it needs next is not computed by a chunk."""
        return self.blocked or self.blind or self.unscored

    @property
    def kept(self) -> Kept | None:
        """What stays of its request's prompt; its tokens are without the rest."""
        return self.sequences[0].kept

    @property
    def exact(self) -> int:
        """Tokens whose state is what it is in any prompt that begins with them."""
        return self.kept.exact if self.kept is not None else len(self.tokens)

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def group(self) -> int:
        return self.sequences[0].group

    @property
    def begun(self) -> bool:
        return self.stage is not Stage.WAITING

    @property
    def left(self) -> int:
        return len(self.tokens) - 1 - (self.done or self.known)

    @property
    def cost(self) -> int:
        """Tokens that are to be run for it, or have been: all but what was found."""
        return len(self.tokens) - 1 - (self.cached or self.known)

    @property
    def reach(self) -> int:
        """Tokens until the next place where it must pause."""
        pause = next((p - self.done for p in self.pauses if p > self.done), self.left)
        return min(pause, self.visible - self.done)

    def shares(self, other: Prefill) -> bool:
        """Whether the other is about to compute tokens that this one needs as well."""
        begin = max(self.known, other.done)
        end = begin + ALIKE
        if self.salt != other.salt or end > min(self.length, other.length):
            return False
        alike = self.tokens[begin:end] == other.tokens[begin:end]
        return alike and self.tokens[:begin] == other.tokens[:begin]

    @property
    def salt(self) -> str:
        return self.request.cache_salt

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return len(self.sequences)

    @property
    def wants_logprobs(self) -> bool:
        asked = self.request.prompt_logprobs is not None and not self.quiet
        return asked and not self.sequences[0].tokens

    def narrow(self, width: int, number: int, now: float) -> Prefill:
        """Keep so many rows; the others become a prompt of their own, with half the waiting behind it."""
        arrived = (self.arrived + now) / 2
        rest = Prefill(number, self.request, self.sequences[width:], self.tokens, arrived)
        rest.quiet = True
        rest.known = self.known
        rest.pauses = list(self.pauses)
        rest.blind = self.blind
        self.sequences = self.sequences[:width]
        return rest

    def progress(self) -> Prefilled:
        prompt = len(self.request.prompt)
        cached, written = min(prompt, self.cached), min(prompt, self.written)
        return Prefilled(self.request.id, self.done, self.length, cached, self.hit, written)


def apart(mixed: abc.Sequence[Prefill | Sequence]) -> tuple[list[Prefill], list[Sequence]]:
    prefills = [each for each in mixed if isinstance(each, Prefill)]
    return prefills, [each for each in mixed if isinstance(each, Sequence)]


def rank(each: Prefill | Sequence) -> float:
    """By when it came, and how important it is: the least goes first."""
    return each.arrived - each.priority * PRIORITY_SECONDS


def lengths_of(prefills: Iterable[Prefill]) -> list[int]:
    """The lengths of all their rows."""
    return [j.length for j in prefills for _ in range(j.width)]


def grouped(choices: list[Choice]) -> list[list[int]]:
    """The places of choices that have the same tokens behind them: usually all of them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, choice in enumerate(choices):
        groups.setdefault(tuple(choice.generated), []).append(place)
    return list(groups.values())
