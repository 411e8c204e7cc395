"""What is asked, and what came back: prompts of many lengths from a seed alone, greedy and drawn.

Pure but for the tokenizer it is given. The words are ours, so that a report need not hide a user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from millrace.bench.workload import compose
from millrace.errors import SetupError

TEMPERATURE, TOP_K = 0.8, 20
"""Of the drawn answers."""
REPORTED = 100
"""Likeliest tokens that are told at each place: in low precision many are as likely as the last that a
draw may take, and all of those are drawn from."""
_WORDS_PER_TOKEN = 1.2
_DOUBLINGS = 6
_SPREAD = (0.03, 0.07, 0.14, 0.22, 0.38, 0.51, 0.71, 1.0)


class QuestionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked."""

    prompts: int = 8
    longest: int = 450
    """Tokens of the longest prompt of the equalities."""
    tokens: int = 48
    """Of an answer; a resumed one has twice as many."""
    speed_prompt: int = 128
    speed_tokens: int = 32
    speed_seconds: float = 60.0
    """After which no further round of speed begins."""
    rounds: int = 5
    load: int = 32
    """Requests of the load under which memory is watched."""


QUICK = QuestionSettings(
    prompts=4,
    longest=200,
    tokens=24,
    speed_prompt=96,
    speed_tokens=16,
    speed_seconds=15.0,
    rounds=2,
    load=12,
)

Tokenize = Callable[[str], list[int]]


class Question(msgspec.Struct, frozen=True):
    ids: list[int]
    tokens: int
    seed: int | None = None
    """None is the likeliest token each time."""

    def sampling(self) -> dict[str, Any]:
        """Everything that a model's own defaults could otherwise change is said."""
        said: dict[str, Any] = {
            "max_new_tokens": self.tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        if self.seed is not None:
            said |= {"temperature": TEMPERATURE, "top_k": TOP_K, "sampling_seed": self.seed}
        return said


class ProvedAnswer(msgspec.Struct, frozen=True):
    tokens: list[int]
    text: str = ""
    cached: int = 0
    """Tokens of the prompt that were not run."""
    tops: list[dict[int, float]] | None = None
    """The likeliest tokens of each place with their logprobs, where they were asked for."""


def text_of(name: str, tokens: int, tokenize: Tokenize) -> list[int]:
    """A prompt of exactly so many tokens."""
    words = max(8, round(tokens * _WORDS_PER_TOKEN))
    for doubled in range(_DOUBLINGS):
        ids = tokenize(compose(name, words << doubled, chat=False))
        if len(ids) >= tokens:
            return ids[:tokens]
    raise SetupError("The model's tokenizer makes next to nothing of English words.")


def lengths(count: int, longest: int) -> list[int]:
    """From a few tokens to the longest, none twice as long as the one before for no reason."""
    shares = [_SPREAD[(i + 1) * len(_SPREAD) // count - 1] for i in range(count)]
    return [max(4, round(share * longest)) for share in shares]


def make(settings: QuestionSettings, tokenize: Tokenize, window: int) -> list[Question]:
    """Each prompt greedy, then each drawn by a seed of its own. The first two of both are longer."""
    longest = min(settings.longest, window // 2)
    prompts = [
        text_of(f"proof/{i}", length, tokenize)
        for i, length in enumerate(lengths(settings.prompts, longest))
    ]
    made = []
    for seeded in (False, True):
        for i, ids in enumerate(prompts):
            tokens = settings.tokens * (2 if i < 2 else 1)
            tokens = min(tokens, max(8, window - len(ids) - 1))
            made.append(Question(ids, tokens, 1000 + i if seeded else None))
    return made


def next_turn(question: Question, answer: ProvedAnswer, more: Sequence[int]) -> Question:
    """The conversation goes on: what was asked and answered, and something new."""
    ids = [*question.ids, *answer.tokens, *more]
    return Question(ids, question.tokens, question.seed)
