"""Tokenizers built from metadata: against the real ones, and exact on the way back."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gguf_files import BOS, EOS, MERGES, TOKENS, TYPES
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from millrace.errors import ModelError
from millrace.models.gguf.pieces import derive_merges
from millrace.models.gguf.reader import GGUF
from millrace.models.gguf.tokenizer import BuiltTokenizer, build_tokenizer

REAL = {
    "smollm2": "smollm",
    "qwen2.5": "qwen2",
    "qwen3": "qwen2",
    "qwen3.5": "qwen35",
    "llama3.2": "llama-bpe",
    "mistral-nemo": "tekken",
    "deepseek-r1": "deepseek-v3",
    "glm-4.7-flash": "glm4",
    "gpt-oss-built": "gpt-4o",
    "llama2": None,
    "gemma3": None,
}
TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345.67 degrees; they'll say WE'VE won.",
    "  two spaces\n\n\nlines\t\ttabs \r\n end   ",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # comment\n",
    "naïve café, Ångström, e\u0301 and é, straße, ǅ",
    "日本語のテキスト、中文文本，한국어 텍스트 ไทย العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ☕️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\u00a0x\u3000y",
    "<|im_start|>user\nhi<|im_end|> <tool_call></tool_call> <s> </s> <bos><end_of_turn>",
    "<html><body>a\n\n\n</body></html> \n \n  ▁▁ _x_ $%^&*() ---- ==== !!!!",
    "\x00\x01\x7f\ufeff\ufffd \U0010ffff",
]


def random_text(rng: random.Random) -> str:
    ranges = [(32, 126), (9, 13), (48, 57), (160, 591), (880, 1327), (1424, 1791), (2304, 2431)]
    ranges += [(0x3040, 0x30FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF)]
    words = ["the", " of", "    ", "\n\n", "return", "'s", "I'LL", "123", "3.14159", "é", "👍🏽"]
    parts = []
    for _ in range(rng.randint(0, 24)):
        if rng.random() < 0.4:
            parts.append(rng.choice(words))
        else:
            low, high = rng.choice(ranges)
            parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))))
    return "".join(parts)


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return TEXTS + [random_text(rng) for _ in range(count)]


def built(metadata: dict[str, Any]) -> BuiltTokenizer:
    return build_tokenizer(GGUF(Path("m.gguf"), metadata))


def as_metadata(folder: Path, name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A real tokenizer, and what a GGUF file would say of it."""
    with zipfile.ZipFile(folder / "tokenizers" / f"{name}.zip") as archive:
        real = json.loads(archive.read("tokenizer.json"))
    vocabulary: dict[str, int] = dict(real["model"]["vocab"])
    types = {}
    for added in real["added_tokens"]:
        vocabulary[added["content"]] = added["id"]
        types[added["id"]] = 3 if added["special"] else 4
    size = max(vocabulary.values()) + 1
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [types.get(i, 5) for i in range(size)]
    for token, i in vocabulary.items():
        tokens[i] = token
        kinds[i] = types.get(i, 6 if token.startswith("<0x") and len(token) == 6 else 1)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": False,
    }
    if REAL[name] is None:
        scores = [-1000.0 if kind != 1 else -float(i) for i, kind in enumerate(kinds)]
        if name == "llama2":
            # Its SentencePiece model scores runs of spaces last.
            scores = [
                -1e9 if set(t) == {"▁"} and len(t) > 1 else s
                for t, s in zip(tokens, scores, strict=True)
            ]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        metadata["tokenizer.ggml.unknown_token_id"] = vocabulary["<unk>"]
        metadata["tokenizer.ggml.add_space_prefix"] = name != "gemma3"
    else:
        merges = [m if isinstance(m, str) else " ".join(m) for m in real["model"]["merges"]]
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        metadata["tokenizer.ggml.pre"] = REAL[name]
    return Tokenizer.from_str(json.dumps(real)), metadata


@pytest.mark.parametrize("name", REAL)
def test_gives_the_real_tokens(material: Path, name: str) -> None:
    real, metadata = as_metadata(material, name)
    ours = built(metadata).tokenizer
    for text in texts(300):
        ids = real.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == real.decode(
            ids, skip_special_tokens=False
        )


def test_derives_the_real_merges(material: Path) -> None:
    with zipfile.ZipFile(material / "tokenizers" / "llama2.zip") as archive:
        real = json.loads(archive.read("tokenizer.json"))
    _, metadata = as_metadata(material, "llama2")
    merges = derive_merges(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.token_type"],
        metadata["tokenizer.ggml.scores"],
    )
    wanted = [tuple(m.split(" ") if isinstance(m, str) else m) for m in real["model"]["merges"]]
    assert sorted(merges) == sorted(wanted)


BYTES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
}
PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁ab",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
    "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -4.0, -3.0, -1.0, -2.0],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


@given(st.text())
@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "tekken", "deepseek-v3", "deepseek-coder", "default"]
)
def test_any_text_comes_back_from_byte_level(pre: str, text: str) -> None:
    tokenizer = _cached(pre)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


_CACHE: dict[str, Tokenizer] = {}


def _cached(pre: str) -> Tokenizer:
    if pre not in _CACHE:
        _CACHE[pre] = built(BYTES | {"tokenizer.ggml.pre": pre}).tokenizer
    return _CACHE[pre]


@given(st.text())
@pytest.mark.parametrize("prefix", [True, False])
def test_any_text_comes_back_from_pieces(prefix: bool, text: str) -> None:
    if "▁" in text:
        return
    key = f"pieces {prefix}"
    if key not in _CACHE:
        _CACHE[key] = built(PIECES | {"tokenizer.ggml.add_space_prefix": prefix}).tokenizer
    ids = _CACHE[key].encode(text, add_special_tokens=False).ids
    assert _CACHE[key].decode(ids, skip_special_tokens=False) == text


def test_merges_follow_the_scores() -> None:
    tokenizer = built(PIECES).tokenizer
    assert tokenizer.encode("ab ab b").tokens == ["<s>", "▁ab", "▁ab", "▁", "b"]


def test_kinds_of_added_tokens() -> None:
    tokenizer = built(BYTES).tokenizer
    ids = tokenizer.encode("<|im_start|>hello world<tool><|im_end|>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == [
        "<|im_start|>", "hello", "Ġworld", "<tool>", "<|im_end|>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "hello world<tool>"


@pytest.mark.parametrize(
    ("said", "pre", "expected"),
    [(None, "gpt-2", False), (True, "gpt-2", True), (None, "llama-bpe", True), (False, "llama-bpe", False)],
)  # fmt: skip
def test_bos_comes_first_where_the_file_or_its_kind_says(
    said: bool | None, pre: str, expected: bool
) -> None:
    metadata = BYTES | {"tokenizer.ggml.pre": pre}
    if said is not None:
        metadata["tokenizer.ggml.add_bos_token"] = said
    generated = built(metadata)
    assert (generated.tokenizer.encode("hello").ids[0] == BOS) is expected
    assert generated.settings["add_bos_token"] is expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.token_type": [1]}, "list of tokens"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "not a merge"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "merges do not fit"),
        ({"tokenizer.ggml.model": "rwkv"}, "kind 'rwkv'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of'"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        built(BYTES | change)
