"""The default model by our own kernels beside MLX's float32: what a text costs, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from millrace.models import placement

TOKENS = 120
_ROOT = Path(__file__).resolve().parents[2]


def _logprobs(model: Any, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Of each token after the first, given those before it."""
    logits = model(mx.array([tokens[:-1]]), cache=make_prompt_cache(model))
    found = np.array(logits.astype(mx.float32))[0].astype(np.float64)
    found -= found.max(axis=-1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
    scores: npt.NDArray[np.float64] = found[np.arange(len(found)), tokens[1:]]
    return scores


def test_a_text_costs_what_it_costs_in_float32(default_model: Path) -> None:
    text = (_ROOT / "docs" / "architecture.md").read_text()
    tokens = Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(text).ids[:TOKENS]
    assert len(tokens) == TOKENS
    found = []
    for weights in ("auto", "f32"):
        model, _ = load_model(default_model, lazy=True)
        model = placement.place(model, weights, "cpu", default_model)  # type: ignore[arg-type]
        found.append(_logprobs(model, tokens))
    ours, theirs = found
    assert np.abs(ours - theirs).max() < 2e-3
    assert abs(np.exp(theirs.mean() - ours.mean()) - 1) < 1e-3
