"""What is asked of the servers: prompts, output lengths and arrival times, from a seed alone.

Pure: the same options give the same requests on any machine. A token is only estimated here,
through a `Sizing` that `calibrate` can fit to a server.
"""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec

from millrace.bench.lengths import Length, draw
from millrace.bench.words import WORDS

_CLOSING = "Continue this list with many more lines."
_LINE = (7, 12)


class Sizing(msgspec.Struct, frozen=True):
    """Tokens of a generated prompt = overhead + tokens_per_word × words."""

    tokens_per_word: float = 1.5
    overhead: float = 40.0
    """The chat template's share, the tag at the start and the closing line."""

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


class WorkloadMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request: messages, or a raw prompt."""

    messages: tuple[WorkloadMessage, ...] | None = None
    prompt: str | None = None
    max_tokens: int
    arrival: float | None = None
    """Seconds after the start of its round; None in a closed loop."""


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """How generated requests look."""

    prompt: Length
    output: Length
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    chat: bool = True
    sizing: Sizing = Sizing()


def generate(shape: WorkloadShape, count: int, seed: int, stream: str) -> list[Item]:
    """`count` requests; `stream` keeps levels and warm-up apart, so that no prompt repeats.

    The shared prefix depends on the seed alone: it is the same in every stream. All other
    prompts differ from their first word on, so that no prefix cache can help them.
    """
    prefix = ""
    if shape.prefix_tokens:
        words = max(1, round(shape.prefix_tokens / shape.sizing.tokens_per_word))
        prefix = "\n".join(_lines(random.Random(f"{seed}/prefix"), words)) + "\n\n"
    rng = random.Random(f"{seed}/{stream}")
    return [_item(shape, rng, f"{seed}/{stream}/{i}", prefix) for i in range(count)]


def _item(shape: WorkloadShape, rng: random.Random, name: str, prefix: str) -> Item:
    tokens = draw(shape.prompt, rng)
    max_tokens = draw(shape.output, rng)
    shared = prefix if rng.random() < shape.prefix_share else ""
    own = tokens - (shape.prefix_tokens if shared else 0)
    text = shared + compose(name, shape.sizing.words(own), chat=shape.chat)
    if shape.chat:
        return Item(messages=(WorkloadMessage("user", text),), max_tokens=max_tokens)
    return Item(prompt=text, max_tokens=max_tokens)


def compose(name: str, words: int, *, chat: bool) -> str:
    """A numbered list of that many words that asks to be continued: models seldom end one early.

    The name decides every word, and a tag made from it comes first.
    """
    rng = random.Random(name)
    lines = _lines(rng, words)
    closing = f"\n{_CLOSING}" if chat else f"{len(lines) + 1}."
    tag = f"{rng.choice(WORDS).capitalize()} {rng.getrandbits(32):08x}"
    return "\n".join([f"{tag}: notes", *lines, closing])


def poisson(items: list[Item], rate: float, seed: int, stream: str) -> list[Item]:
    """The items with arrival times of a Poisson process of `rate` requests a second."""
    rng = random.Random(f"{seed}/{stream}/arrivals")
    now, placed = 0.0, []
    for item in items:
        now += rng.expovariate(rate)
        placed.append(msgspec.structs.replace(item, arrival=now))
    return placed


def split(items: list[Item], rounds: int) -> list[list[Item]]:
    """The items in `rounds` runs of nearly equal length, each with its own clock from zero.

    The gap before a round's first arrival is kept, so that the rounds together last as long as
    the whole would.
    """
    rounds = max(1, min(rounds, len(items)))
    cuts = [len(items) * i // rounds for i in range(rounds + 1)]
    parts, start = [], 0.0
    for low, high in pairwise(cuts):
        part = items[low:high]
        parts.append([_earlier(item, start) for item in part])
        if part and part[-1].arrival is not None:
            start = part[-1].arrival
    return parts


def _earlier(item: Item, seconds: float) -> Item:
    if item.arrival is None:
        return item
    return msgspec.structs.replace(item, arrival=item.arrival - seconds)


def _lines(rng: random.Random, words: int) -> list[str]:
    lines: list[str] = []
    while words > 0:
        size = min(words, rng.randint(*_LINE))
        words -= size
        text = " ".join(rng.choice(WORDS) for _ in range(size))
        lines.append(f"{len(lines) + 1}. {text.capitalize()}.")
    return lines
