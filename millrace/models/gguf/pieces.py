"""SentencePiece tokenizers (`llama` in GGUF): BPE whose merges follow from the tokens' scores.

Spaces travel as `▁`, and characters without a token fall back to their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from millrace.errors import ModelError
from millrace.models.gguf.reader import GGUF

_SPACE = "▁"
_USER_DEFINED = 4
_MERGED = (1, _USER_DEFINED)


def pieces(model: GGUF, tokens: list[str], types: list[int]) -> Tokenizer:
    scores: list[float] = model.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ModelError(f"{model.path} is corrupt: it has {len(scores)} scores for its tokens.")
    unknown = model.get("tokenizer.ggml.unknown_token_id", int)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(
        vocabulary,
        derive_merges(tokens, types, scores),
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefixed = model.get("tokenizer.ggml.add_space_prefix", bool)
    to_space = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed is None or prefixed:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_space])
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = to_space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def derive_merges(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best-scored token first.

    SentencePiece cuts tokens a user defined out of the text before it merges anything, which
    here is the best score of all. Longer parts go first among equals.
    """
    ids = {token: i for i, token in enumerate(tokens)}

    def found() -> Iterator[tuple[float, int, int, str, str]]:
        for token, kind, score in zip(tokens, types, scores, strict=True):
            if kind not in _MERGED or len(token) < 2:
                continue
            rank = math.inf if kind == _USER_DEFINED else score
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = [(ids[a], ids[b], a, b) for a, b in splits if a in ids and b in ids]
            for _, _, left, right in sorted(known):
                yield rank, len(left), len(right), left, right

    ranked = sorted(found(), key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]
