"""Pictures in prompts: what stands in their places, and which tokens are theirs.

A template writes one placeholder for each picture, and the model's processor says what becomes of it.
Text that merely spells a placeholder is never one: it reaches the model as plain characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import BadRequest, ModelError
from millrace.protocol import Span

_SPLIT = "\ue003"
"""A private character, which no template and no text has: where a spelled placeholder is taken apart."""


_DISAGREE = "The model's processor and its tokenizer do not agree on how many tokens a picture has."


class PictureWords(msgspec.Struct, frozen=True):
    """How a model's prompts speak of pictures."""

    placeholder: str
    """What its template writes for one."""
    token: int
    """The token that stands for each of a picture's features."""
    token_text: str
    moving: bool = False
    """Whether a video may stand where a picture may."""


class Expansion(msgspec.Struct, frozen=True):
    """What becomes of one picture's placeholder."""

    text: str
    tokens: int
    """How many tokens stand for features."""
    grid: tuple[int, ...] = ()


def guarded(value: Any, words: PictureWords) -> Any:
    """The value with every spelled placeholder taken apart, wherever in it it stands."""
    if isinstance(value, str):
        for word in {words.placeholder, words.token_text}:
            if word in value:
                value = value.replace(word, word[:1] + _SPLIT + word[1:])
        return value
    if isinstance(value, Mapping):
        return {guarded(key, words): guarded(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guarded(item, words) for item in value]
    return value


class ExpandedPrompt:
    """A rendered prompt with its pictures' placeholders expanded."""

    def __init__(
        self,
        rendered: str,
        digests: Sequence[str],
        words: PictureWords,
        pictures: Mapping[str, Expansion],
    ) -> None:
        self._words = words
        self._pictures = [(digest, pictures[digest]) for digest in digests]
        around = rendered.split(words.placeholder)
        if len(around) - 1 != len(digests):
            raise BadRequest(
                f"The model's chat template wrote {len(around) - 1} places for {len(digests)} "
                "pictures: it cannot show them where they stand in these messages.",
                param="messages",
            )
        self.plain = rendered.replace(_SPLIT, "")
        """One placeholder for each picture, as the template wrote it."""
        parts = [around[0]]
        for (_, picture), text in zip(self._pictures, around[1:], strict=True):
            parts += [picture.text, text]
        self.pieces = "".join(parts).split(_SPLIT)
        """The prompt's text, cut where nothing may be one token with what follows."""
        self._moves = _moves(around, self._pictures, len(words.placeholder))

    def place(self, at: int) -> int:
        """Where in the expanded text a place of the rendered one is."""
        moved = at
        for begin, growth in self._moves:
            if begin >= at:
                break
            moved += growth
        return moved

    def spans(self, tokens: Sequence[int]) -> list[Span]:
        """Where the pictures stand among the prompt's tokens."""
        places = [at for at, token in enumerate(tokens) if token == self._words.token]
        if len(places) != sum(picture.tokens for _, picture in self._pictures):
            raise ModelError(_DISAGREE)
        found, done = [], 0
        for digest, picture in self._pictures:
            own = places[done : done + picture.tokens]
            done += picture.tokens
            found.append(Span(own[0], own[-1] + 1 - own[0], digest, picture.grid))
        return found


def expanded_tokens(
    tokens: Sequence[int],
    placeholder: int,
    pictures: Sequence[tuple[str, Expansion, list[int]]],
    words: PictureWords,
) -> tuple[list[int], list[Span]]:
    """A raw prompt with the tokens of each picture in the place of its placeholder."""
    if tokens.count(placeholder) != len(pictures):
        raise BadRequest(
            f"The prompt has {tokens.count(placeholder)} places for {len(pictures)} pictures: write "
            f"'{words.placeholder}' where each of them belongs.",
            param="image_data",
        )
    found: list[int] = []
    spans: list[Span] = []
    waiting = iter(pictures)
    for token in tokens:
        if token != placeholder:
            found.append(token)
            continue
        digest, picture, own = next(waiting)
        places = [at for at, one in enumerate(own) if one == words.token]
        if len(places) != picture.tokens:
            raise ModelError(_DISAGREE)
        start = len(found) + places[0]
        spans.append(Span(start, places[-1] + 1 - places[0], digest, picture.grid))
        found += own
    return found, spans


def _moves(
    around: Sequence[str], pictures: Sequence[tuple[str, Expansion]], length: int
) -> list[tuple[int, int]]:
    """Places of the rendered text, and by how much what follows each of them moves."""
    found: list[tuple[int, int]] = []
    begin = 0
    for number, text in enumerate(around):
        at = text.find(_SPLIT)
        while at >= 0:
            found.append((begin + at, -len(_SPLIT)))
            at = text.find(_SPLIT, at + 1)
        begin += len(text)
        if number < len(pictures):
            found.append((begin, len(pictures[number][1].text) - length))
            begin += length
    return found
