"""Fill-in-the-middle: the text between a prefix and a suffix, as families of code models mark it.

A table of markers and their order; the vocabulary tells which family a model is of. The prompt is
put together in token ids, so that a marker is a token and never the text that spells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FimFamily:
    name: str
    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    """The suffix comes before the prefix, which the model then goes on with."""
    ends: tuple[str, ...] = ()
    """What the model says when the middle is full, beside its end token and these markers."""


FAMILIES = (
    FimFamily(
        "qwen",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<|file_separator|>"),
    ),
    FimFamily(
        "starcoder",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>"),
    ),
    FimFamily(
        "santacoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)
    ),
    FimFamily("deepseek", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FimFamily("code-llama", "▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    FimFamily("codestral", "[PREFIX]", "[SUFFIX]", None, suffix_first=True),
    FimFamily(
        "seed-coder", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True
    ),
    FimFamily("glm", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
)  # fmt: skip
"""CodeGemma and Granite share the markers of `qwen`; MiniMax those of `starcoder`."""


class Infill:
    """One model's way to fill a middle."""

    def __init__(self, family: FimFamily, tokenizer: Tokenizer) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._lead = _lead(tokenizer)
        self._prefix = self._id(family.prefix)
        self._suffix = self._id(family.suffix)
        self._middle = [self._id(family.middle)] if family.middle else []
        known = map(tokenizer.vocabulary.id_of, family.ends)
        markers = {self._prefix, self._suffix, *self._middle}
        self.ends = sorted(markers | {id for id in known if id is not None})
        """Tokens at which the middle is full."""

    @property
    def name(self) -> str:
        return self._family.name

    def prompt(self, prefix: Sequence[int], suffix: str) -> list[int]:
        """The prompt for what stands between; `prefix` may begin with the tokenizer's own lead."""
        before = list(prefix)
        if before[: len(self._lead)] == self._lead:
            before = before[len(self._lead) :]
        first = [self._prefix, *before]
        second = [self._suffix, *_continued(self._tokenizer, suffix)]
        parts = [*second, *first] if self._family.suffix_first else [*first, *second]
        return [*self._lead, *parts, *self._middle]

    def _id(self, text: str) -> int:
        id = self._tokenizer.vocabulary.id_of(text)
        assert id is not None
        return id


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """How this model fills a middle; None for one whose vocabulary has no markers for it."""
    has = tokenizer.vocabulary.id_of
    for family in FAMILIES:
        markers = (family.prefix, family.suffix, family.middle or family.prefix)
        if all(has(marker) is not None for marker in markers):
            return Infill(family, tokenizer)
    return None


def _lead(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every raw text: a BOS, say."""
    plain, full = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at]
    return []


def _continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as the middle of another: without the space that some tokenizers put before it."""
    ids = tokenizer.encode(text)
    if b"".join(map(tokenizer.vocabulary.bytes_of, ids)) != b" " + text.encode():
        return ids
    anchor = tokenizer.encode(_ANCHOR)
    longer = tokenizer.encode(_ANCHOR + text)
    return longer[len(anchor) :] if longer[: len(anchor)] == anchor else ids


_ANCHOR = "☺"
"""A character that no merge joins with what follows."""
