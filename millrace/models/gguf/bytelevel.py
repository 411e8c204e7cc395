"""Byte-level BPE tokenizers: the vocabulary and merges as stored, text cut as the name says.

GGUF names the way text is cut into words (`tokenizer.ggml.pre`) and does not describe it; the
table here does. An unknown name is refused, since a wrong cut gives wrong tokens silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from millrace.errors import ModelError
from millrace.models.gguf.reader import GGUF

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_ENDINGS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = (
    rf"{_ENDINGS}|{_BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_TEKKEN = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_O200K = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_UNNAMED = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True)
class Cut:
    """How text becomes words before merging."""

    patterns: tuple[str, ...]
    digits: bool = False
    """Every digit is a word of its own, ahead of the patterns."""
    compose: bool = False
    """Text is put into Unicode's composed form (NFC) first."""
    whole_words: bool = False
    """A word that is a token is taken as it is, whatever the merges would make of it."""
    bos: bool = False
    """Texts start with BOS unless the file says otherwise."""


_CUTS = {
    ("gpt-2", "gpt2"): Cut((_GPT2,)),
    ("smollm", "starcoder", "refact", "minerva-7b"): Cut((_GPT2,), digits=True),
    ("llama-bpe", "llama3", "llama-v3"): Cut((_LLAMA3,), whole_words=True, bos=True),
    ("smaug-bpe",): Cut((_LLAMA3,)),
    ("glm4",): Cut((_LLAMA3,), whole_words=True),
    ("qwen2", "deepseek-r1-qwen"): Cut((_QWEN2,), compose=True),
    ("qwen35",): Cut((_QWEN35,), compose=True),
    ("tekken",): Cut((_TEKKEN,), whole_words=True, bos=True),
    ("gpt-4o", "llama4"): Cut((_O200K,)),
    ("deepseek-v3",): Cut(_DEEPSEEK3),
    ("deepseek-coder",): Cut(_DEEPSEEK_CODER),
    ("default",): Cut(_UNNAMED),
}
CUTS = {name: cut for names, cut in _CUTS.items() for name in names}


def byte_level(model: GGUF, tokens: list[str]) -> Tokenizer:
    cut = _cut(model)
    merges = []
    for merge in model.need("tokenizer.ggml.merges", list):
        left, space, right = str(merge).partition(" ")
        if not (left and space and right):
            raise ModelError(f"{model.path} is corrupt: '{merge}' is not a merge of two tokens.")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocabulary, merges, ignore_merges=cut.whole_words)
    except Exception as error:
        raise ModelError(f"{model.path} is corrupt: its merges do not fit: {error}.") from None
    tokenizer = Tokenizer(bpe)
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_steps(cut))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def starts_with_bos(model: GGUF) -> bool:
    return _cut(model).bos


def _cut(model: GGUF) -> Cut:
    name = model.get("tokenizer.ggml.pre", str)
    if name is None:
        # Files from before the key existed; Qwen's way of cutting never changed.
        name = "qwen2" if model.metadata.get("general.architecture") == "qwen2" else "default"
    if name not in CUTS:
        raise ModelError(
            f"{model.path} cuts text the way '{name}' (tokenizer.ggml.pre), which GGUF import "
            f"does not know, and a guess would give wrong tokens. It knows {', '.join(CUTS)}; "
            f"use the model's MLX or Hugging Face folder instead."
        )
    return CUTS[name]


def _steps(cut: Cut) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.patterns == (_GPT2,):
        return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
