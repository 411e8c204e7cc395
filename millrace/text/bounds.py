"""How few tokens a text can have at the very least, told by its length alone.

A token of a vocabulary that knows every byte stands for no more bytes than it holds. Where a
tokenizer may lose text before it counts (by normalising, by leaving out, by one token for whatever
is unknown), nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ModelError
from millrace.models.files import MOST_TOKENIZER, read_bytes
from millrace.text.vocabulary import BYTE_ALPHABET

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Pre-tokenizers that leave nothing out, whatever their settings."""
_CUTTING = frozenset({"Split", "Punctuation"})
"""Those that leave out what they split at, if told so."""
_COMPOSING = frozenset({"NFC", "NFKC", "NFD", "NFKD"})
"""Normalizers that leave ASCII as it is."""


class _AddedMark(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _ModelKind(msgspec.Struct, frozen=True):
    type: str | None = None
    byte_fallback: bool | None = False


class _TokenizerKind(msgspec.Struct):
    model: _ModelKind = _ModelKind()
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[_AddedMark] = []


class FewestTokens:
    """A lower bound on the tokens of texts, for one tokenizer."""

    def __init__(self, file: Path, vocabulary: Mapping[str, int]) -> None:
        try:
            known = msgspec.json.decode(read_bytes(file, MOST_TOKENIZER), type=_TokenizerKind)
        except (ModelError, ValueError, RecursionError):
            known = _TokenizerKind()
        self._longest = _longest(known, vocabulary)
        self._unknown = b""
        if "ByteLevel" in _types(known.pre_tokenizer):
            self._unknown = b"".join(b for c, b in BYTE_ALPHABET.items() if c not in vocabulary)
        """Bytes that byte-level vocabularies may lack, and which then go without a token."""
        self._ascii_only = not _keeps(known.normalizer, ascii_only=False)
        # Such tokens take any blanks beside them along.
        self._blanks_vanish = any(t.lstrip or t.rstrip for t in known.added_tokens)

    def of(self, text: str) -> int:
        """No tokenising of the text can have fewer; 0 where nothing is known."""
        if self._longest is None or (self._ascii_only and not text.isascii()):
            return 0
        if self._blanks_vanish:
            text = "".join(text.split())
        data = text.encode()
        if self._unknown:
            data = data.translate(None, self._unknown)
        return -(-len(data) // self._longest)

    def of_ascii(self, characters: int) -> int:
        """The same for that many characters of ASCII that are not blank, whichever they are."""
        if self._longest is None or any(33 <= byte < 127 for byte in self._unknown):
            return 0
        return -(-characters // self._longest)


def _longest(known: _TokenizerKind, vocabulary: Mapping[str, int]) -> int | None:
    """Bytes of the longest token; None if a token may stand for more than it holds."""
    byte_level = "ByteLevel" in _types(known.pre_tokenizer)
    falls_back = known.model.byte_fallback and all(f"<0x{b:02X}>" in vocabulary for b in range(256))
    if not (
        known.model.type in ("BPE", "Unigram")
        and (byte_level or falls_back)
        and _keeps(known.normalizer, ascii_only=True)
        and _leaves_nothing_out(known.pre_tokenizer)
    ):
        return None
    plain = max(len(t) if byte_level else len(t.encode()) for t in vocabulary)
    return max([plain, *(len(t.content.encode()) for t in known.added_tokens)])


def _parts(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [p for inner in step[key] for p in _parts(inner, key)] if key in step else [step]


def _types(step: dict[str, Any] | None) -> set[str]:
    return {p.get("type", "") for p in _parts(step, "pretokenizers")}


def _leaves_nothing_out(step: dict[str, Any] | None) -> bool:
    return all(
        p.get("type") in _KEEPING
        or (p.get("type") in _CUTTING and p.get("behavior", "Removed") != "Removed")
        for p in _parts(step, "pretokenizers")
    )


def _keeps(step: dict[str, Any] | None, *, ascii_only: bool) -> bool:
    """Whether a normalizer makes no text shorter."""
    return all(
        p.get("type") == "Prepend"
        or (ascii_only and p.get("type") in _COMPOSING)
        or (p.get("type") == "Replace" and p.get("pattern") == {"String": " "} and p.get("content"))
        for p in _parts(step, "normalizers")
    )
