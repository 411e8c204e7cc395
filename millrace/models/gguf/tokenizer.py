"""Builds a tokenizer from a GGUF file's metadata, with its special tokens and chat template.

Which tokens are special, what is put before a text and what ends one is decided here; how text
is cut and merged is for `bytelevel` and `pieces`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from millrace.errors import ModelError
from millrace.models.gguf.bytelevel import byte_level, starts_with_bos
from millrace.models.gguf.pieces import pieces
from millrace.models.gguf.reader import GGUF

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_MOST_WORK = 500_000_000
"""The squares of all tokens' lengths together, which is what it takes to find how they are merged. A
vocabulary of 260,000 tokens has about 20 million."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")


@dataclass(frozen=True)
class BuiltTokenizer:
    tokenizer: Tokenizer
    settings: dict[str, Any]
    """The content of tokenizer_config.json."""
    bos: int | None
    eos: list[int]
    pad: int | None


def build_tokenizer(model: GGUF) -> BuiltTokenizer:
    kind = model.need("tokenizer.ggml.model", str)
    tokens: list[str] = model.need("tokenizer.ggml.tokens", list)
    types: list[int] = model.get("tokenizer.ggml.token_type", list) or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens) or not all(isinstance(t, str) for t in tokens):
        raise ModelError(f"{model.path} is corrupt: its list of tokens is not whole.")
    if sum(len(token) ** 2 for token in tokens) > _MOST_WORK:
        raise ModelError(f"{model.path} is corrupt: its tokens are too long.")
    if kind == "gpt2":
        tokenizer = byte_level(model, tokens)
        bos_first = starts_with_bos(model)
    elif kind == "llama":
        tokenizer = pieces(model, tokens, types)
        bos_first = True
    else:
        raise ModelError(
            f"{model.path} has a tokenizer of the kind '{kind}'. GGUF import knows 'gpt2' "
            f"(byte-level BPE) and 'llama' (SentencePiece); use the model's MLX or "
            f"Hugging Face folder instead."
        )
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
    bos = _id(model, "bos", tokens)
    given = model.get("tokenizer.ggml.add_bos_token", bool)
    bos_first = bos is not None and (bos_first if given is None else given)
    eos_last = model.get("tokenizer.ggml.add_eos_token", bool) or False
    eos = _ends(model, tokens, types)
    _surround(tokenizer, tokens, bos if bos_first else None, eos[0] if eos_last and eos else None)
    return BuiltTokenizer(
        tokenizer,
        _settings(model, tokens, bos_first, eos_last),
        bos,
        eos,
        _id(model, "padding", tokens),
    )


def _id(model: GGUF, which: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    value = model.get(key, int)
    if value is not None and not 0 <= value < len(tokens):
        # Writers mark "no such token" by the largest number of the field's type.
        return None
    return value


def _ends(model: GGUF, tokens: list[str], types: list[int]) -> list[int]:
    """All ids that end an answer: those the file names, and control tokens known to end turns."""
    named = [_id(model, which, tokens) for which in ("eos", "eot", "eom")]
    known = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and token in _TURN_ENDS
    ]
    return list(dict.fromkeys([i for i in named if i is not None] + known))


def _surround(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    if bos is None and eos is None:
        return
    before = [] if bos is None else [tokens[bos]]
    after = [] if eos is None else [tokens[eos]]
    ids = {tokens[i]: i for i in (bos, eos) if i is not None}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{t}:1" for t in before),
            "$B:1",
            *(f"{t}:1" for t in after),
        ],
        special_tokens=list(ids.items()),
    )


def _settings(model: GGUF, tokens: list[str], add_bos: bool, add_eos: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
    }
    for name, which in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _id(model, which, tokens)) is not None:
            settings[f"{name}_token"] = tokens[token]
    if template := model.get("tokenizer.chat_template", str):
        settings["chat_template"] = template
    return settings
