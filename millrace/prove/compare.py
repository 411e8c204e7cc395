"""Whether two answers are the same tokens and, where they part, whether they could part by rounding.

Pure. In low precision the sums of a batch round in another order than those of one row, so that two
tokens which are as likely as each other may change places: a near-tie, which is told as such and is
neither a pass nor a failure. The logprobs of the answer alone decide it, and not how often it happens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from millrace.prove.questions import TEMPERATURE, TOP_K, ProvedAnswer, Question
from millrace.prove.report import Verdict

_TOLERANCES = {"float32": 0.002, "float16": 0.06, "bfloat16": 0.3}
_UNKNOWN = 0.06
_TF32 = 0.02
"""Products of float32 on CUDA are rounded to eleven bits."""


def tolerance(dtype: str, device: str) -> float:
    """How far apart the logprobs of two tokens may be that rounding may swap."""
    if dtype == "float32" and device == "cuda":
        return _TF32
    return _TOLERANCES.get(dtype, _UNKNOWN)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two answers part first."""

    place: int
    """Tokens that they have in common."""
    near: bool
    alone: float | None = None
    """The logprob of alone's token, alone."""
    other: float | None = None
    """The logprob of the other's token, alone; None where it is not among the likeliest."""
    margin: float | None = None
    """How far from the border between the two the draw fell, of 1."""

    def told(self) -> str:
        where = f"token {self.place + 1}"
        if self.alone is None:
            return f"{where}: one of them ends"
        second = "less likely than all that are told" if self.other is None else f"{self.other:.4f}"
        drawn = "" if self.margin is None else f", drawn {self.margin:.1e} from the border"
        return f"{where}: logprobs {self.alone:.4f} and {second}{drawn}"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A set of answers beside the same ones alone."""

    answers: int
    tokens: int
    differences: list[Difference]
    noise: float | None = None
    """The most that the logprob of the same token at the same place differed, where both were told."""

    @property
    def verdict(self) -> Verdict:
        if not self.answers:
            return "not run"
        if not self.differences:
            return "pass"
        return "near-tie" if all(d.near for d in self.differences) else "fail"

    def told(self) -> str:
        same = self.answers - len(self.differences)
        words = [f"{same} of {self.answers} answers the same, {self.tokens:,} tokens"]
        if self.noise is not None:
            words.append(f"logprobs within {self.noise:.1e}" if self.noise else "logprobs the same")
        far = [d for d in self.differences if not d.near]
        if shown := (far or self.differences):
            kind = "not a near-tie" if far else "near-tie"
            words.append(f"{kind} at {shown[0].told()}")
        return "; ".join(words)


def compared(
    questions: Sequence[Question],
    alone: Sequence[ProvedAnswer],
    others: Sequence[ProvedAnswer],
    *,
    allowed: float,
    width: int,
) -> Comparison:
    """Answers to the same questions; the first ones tell their likeliest tokens."""
    found, noise = [], list[float]()
    tokens = 0
    for question, one, other in zip(questions, alone, others, strict=True):
        difference = first_difference(question, one, other, allowed=allowed, width=width)
        common = len(one.tokens) if difference is None else difference.place
        tokens += common
        if difference is not None:
            found.append(difference)
        if one.tops is not None and other.tops is not None:
            for place in range(common):
                token = one.tokens[place]
                noise.append(abs(one.tops[place][token] - other.tops[place][token]))
    return Comparison(
        answers=len(questions),
        tokens=tokens,
        differences=found,
        noise=max(noise) if noise else None,
    )


def first_difference(
    question: Question, alone: ProvedAnswer, other: ProvedAnswer, *, allowed: float, width: int
) -> Difference | None:
    """None where the tokens are the same. The text of the same tokens must be, too."""
    pairs = zip(alone.tokens, other.tokens, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if common is None:
        if len(alone.tokens) == len(other.tokens):
            return None
        return Difference(place=min(len(alone.tokens), len(other.tokens)), near=False)
    if alone.tops is None:
        return Difference(place=common, near=False)
    tops = alone.tops[common]
    mine, theirs = alone.tokens[common], other.tokens[common]
    first, second = tops[mine], tops.get(theirs)
    if second is None:
        return Difference(place=common, near=False, alone=first)
    if question.seed is None:
        near = first - second <= allowed
        return Difference(place=common, near=near, alone=first, other=second)
    margin = draw_margin(tops, (question.seed, common), mine, theirs, width=width)
    # Two tokens that far apart may be swapped if each is off by half of it.
    near = margin is not None and could_draw(
        tops, (question.seed, common), theirs, allowed / 2, width=width
    )
    return Difference(place=common, near=near, alone=first, other=second, margin=margin)


def draw_margin(
    tops: dict[int, float], draw: tuple[int, int], mine: int, theirs: int, *, width: int
) -> float | None:
    """How far the number that drew `mine` was from drawing `theirs`; None if it did not draw `mine`.

    Both follow from the seed, the place and the distribution, on the way down the sampler's tree.
    """
    floor = _floor(tops)
    weights = {t: math.exp(p / TEMPERATURE) for t, p in tops.items() if p >= floor}
    for level in _way_to(mine, draw, width):
        sums = level.sums(weights)
        total = sum(sums)
        if total <= 0:
            return None
        edges = [sum(sums[:i]) / total for i in range(len(sums) + 1)]
        ours, other = level.branch(mine), level.branch(theirs)
        if not 0 <= ours < len(sums) or not edges[ours] <= level.number <= edges[ours + 1]:
            return None
        if other != ours:
            return edges[other] - level.number if other > ours else level.number - edges[other + 1]
    return None


def could_draw(
    tops: dict[int, float], draw: tuple[int, int], theirs: int, off: float, *, width: int
) -> bool:
    """Whether the numbers draw `theirs` if every logprob may be off by so much.

    That moves the borders, and which tokens are among the likeliest that a draw may take.
    """
    floor = _floor(tops)
    least = {t: math.exp((p - off) / TEMPERATURE) for t, p in tops.items() if p >= floor + 2 * off}
    most = {t: math.exp((p + off) / TEMPERATURE) for t, p in tops.items() if p >= floor - 2 * off}
    for level in _way_to(theirs, draw, width):
        low, high = level.sums(least), level.sums(most)
        at = level.branch(theirs)
        if not 0 <= at < len(high) or not high[at]:
            return False
        first = _share(sum(low[:at]), sum(high[at:]))
        last = _share(sum(high[: at + 1]), sum(low[at + 1 :]))
        if not first <= level.number <= last:
            return False
    return True


def _floor(tops: dict[int, float]) -> float:
    return sorted(tops.values(), reverse=True)[:TOP_K][-1]


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part > 0 else 0.0


class _Level(msgspec.Struct, frozen=True):
    """One step down the sampler's tree: among the tokens from `base` on, in branches of `span`."""

    base: int
    span: int
    fan: int
    number: float

    def branch(self, token: int) -> int:
        return (token - self.base) // self.span

    def sums(self, weights: dict[int, float]) -> list[float]:
        sums = [0.0] * self.fan
        for token, weight in weights.items():
            if 0 <= (at := self.branch(token)) < self.fan:
                sums[at] += weight
        return sums


def _way_to(token: int, draw: tuple[int, int], width: int) -> Iterator[_Level]:
    from millrace.engine.descent import FAN, numbers

    levels: list[float] = numbers(*draw, width)
    span: int = FAN ** len(levels)
    base = 0
    for number in levels:
        span //= FAN
        yield _Level(base, span, FAN, number)
        base += span * ((token - base) // span)
