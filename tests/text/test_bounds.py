"""The fewest tokens that a text can have: never more than it has, whatever the tokenizer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from millrace.text.bounds import FewestTokens
from millrace.text.tokenizer import Tokenizer as Ours

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = st.lists(st.sampled_from(["a", "ab", " ", "  \n", "é", "e\u0301", "😀", "\x04", "<|end|>"]))


def byte_level(known: list[str] = ALPHABET, **added: bool) -> Tokenizer:
    pieces = [*known, "ab", "aba", "abab", "ĠĠ"]
    merges = [("a", "b"), ("ab", "a"), ("ab", "ab"), ("Ġ", "Ġ")]
    made = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", **added)])
    return made


def composing() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def removing() -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def spelled() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab"]
    made = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            [("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


KINDS: dict[str, tuple[Tokenizer, bool]] = {
    "byte level": (byte_level(), True),
    "without some bytes": (byte_level([c for c in ALPHABET if c not in "Ąð"]), True),
    "blanks taken along": (byte_level(lstrip=True, rstrip=True), True),
    "composing": (composing(), True),
    "removing": (removing(), False),
    "spelled in bytes": (spelled(), True),
    "words": (words(), False),
}


@pytest.mark.parametrize("name", KINDS)
@given(parts=TEXTS)
def test_no_text_has_fewer_tokens(tmp_path_factory: Any, name: str, parts: list[str]) -> None:
    tokenizer, _ = KINDS[name]
    fewest = _bound(tmp_path_factory, name, tokenizer)
    text = "".join(parts)
    assert fewest.of(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", KINDS)
def test_something_is_known_where_it_can_be(tmp_path_factory: Any, name: str) -> None:
    tokenizer, known = KINDS[name]
    assert (_bound(tmp_path_factory, name, tokenizer).of("a" * 4000) > 400) == known


_MADE: dict[str, FewestTokens] = {}


def _bound(factory: Any, name: str, tokenizer: Tokenizer) -> FewestTokens:
    if name not in _MADE:
        file: Path = factory.mktemp("tokenizer") / "tokenizer.json"
        file.write_text(tokenizer.to_str())
        _MADE[name] = FewestTokens(file, tokenizer.get_vocab())
    return _MADE[name]


def test_the_default_model_has_a_bound(default_model: Path) -> None:
    tokenizer = Ours(default_model)
    text = json.dumps({"a": ["some words", "é😀"] * 500})
    assert 50 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
