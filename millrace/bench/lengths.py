"""Distributions of lengths in tokens, as written on the command line.

`230` is fixed, `100:300` uniform, `lognormal:230:0.6` lognormal by median and sigma.
"""

from __future__ import annotations

import math
import random

import msgspec

from millrace.errors import SetupError

# A lognormal tail has no end; beyond this multiple of the median a draw is cut.
_TAIL = 16


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    tokens: int


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    low: int
    high: int


class Lognormal(msgspec.Struct, frozen=True, tag="lognormal"):
    median: float
    sigma: float


Length = Fixed | Uniform | Lognormal


def parse_length(option: str, text: str) -> Length:
    """The distribution that `text` names; `option` is named in the error."""
    try:
        if text.startswith("lognormal:"):
            median, sigma = (float(part) for part in text.removeprefix("lognormal:").split(":"))
            if median >= 1 and 0 <= sigma < math.inf and median < math.inf:
                return Lognormal(median, sigma)
        elif ":" in text:
            low, high = (int(part) for part in text.split(":"))
            if 1 <= low <= high:
                return Uniform(low, high)
        elif int(text) >= 1:
            return Fixed(int(text))
    except ValueError:
        pass
    raise SetupError(
        f"{option} {text} is not a length. Write a number (230), a range (100:300), or "
        f"lognormal:MEDIAN:SIGMA (lognormal:230:0.6), all of at least 1 token."
    )


def draw(length: Length, rng: random.Random) -> int:
    """One length, at least 1."""
    match length:
        case Fixed(tokens):
            return tokens
        case Uniform(low, high):
            return rng.randint(low, high)
        case Lognormal(median, sigma):
            value = rng.lognormvariate(math.log(median), sigma)
            return max(1, round(min(value, median * _TAIL)))
