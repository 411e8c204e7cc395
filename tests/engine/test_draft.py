"""What goes together as model and draft, and what is refused at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_lm.models.cache import make_prompt_cache
from native.native_models import Kind

from millrace.engine.specprefill.draft import DraftModel, check_vocabulary
from millrace.engine.specprefill.scores import attention, pooled
from millrace.errors import ModelError


def _folder(path: Path, vocabulary: Any, added: list[tuple[str, int]] = []) -> Path:  # noqa: B006
    path.mkdir()
    tokens = [{"content": text, "id": number} for text, number in added]
    written = {"model": {"vocab": vocabulary}, "added_tokens": tokens}
    (path / "tokenizer.json").write_text(json.dumps(written))
    return path


def test_vocabularies_must_be_the_same_as_far_as_the_models_goes(tmp_path: Path) -> None:
    model = _folder(tmp_path / "model", {"a": 0, "b": 1}, [("<end>", 2)])
    same = _folder(tmp_path / "same", {"a": 0, "b": 1}, [("<end>", 2), ("<more>", 3)])
    listed = _folder(tmp_path / "listed", [["a", 0.0], ["b", -1.0], ["<end>", -2.0]])
    check_vocabulary(model, model)
    check_vocabulary(model, same)
    check_vocabulary(model, listed)
    for name, vocabulary in (("moved", {"b": 0, "a": 1}), ("fewer", {"a": 0})):
        with pytest.raises(ModelError, match="another vocabulary"):
            check_vocabulary(model, _folder(tmp_path / name, vocabulary, [("<end>", 2)]))
    with pytest.raises(ModelError, match="'<more>'"):
        check_vocabulary(same, model)
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        check_vocabulary(model, tmp_path)


@pytest.mark.parametrize(
    "kinds", [("llama", "jamba"), ("qwen3_next", "llama"), ("mamba2", "llama")]
)
def test_models_that_cannot_are_refused_as_either(kinds: tuple[str, str]) -> None:
    target, draft = (tiny.build(kind) for kind in kinds)
    with pytest.raises(ModelError, match="SpecPrefill does not work"):
        DraftModel(draft, make_prompt_cache(draft), target=target, chunk=64, room=1, cached=0)


def test_a_draft_without_a_layer_that_sees_all_is_refused() -> None:
    windows = {"sliding_window": 16, "sliding_window_pattern": 6, "query_pre_attn_scalar": 64}
    draft = Kind("gemma3_text", more=windows).native()
    target = Kind().native()
    with pytest.raises(ModelError, match="look at the whole prompt"):
        DraftModel(draft, draft.make_cache(), target=target, chunk=64, room=1, cached=0)


def test_shares_are_averaged_over_thirteen_neighbours() -> None:
    dice = np.random.default_rng(0)
    for count in (1, 5, 12, 13, 14, 40):
        shares = dice.random((2, 3, count)).astype(np.float32)
        wanted = np.stack(
            [shares[..., max(0, k - 6) : k + 7].mean(-1) for k in range(count)], axis=-1
        )
        assert np.allclose(pooled(mx.array(shares)), wanted, atol=1e-6)


def test_scores_are_the_most_that_any_head_looks_at_a_token() -> None:
    dice = np.random.default_rng(1)
    queries = dice.standard_normal((4, 8)).astype(np.float32)
    keys = dice.standard_normal((2, 50, 8)).astype(np.float32)
    logits = np.stack([keys[head // 2] @ queries[head] for head in range(4)])
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    wanted = np.array(pooled(mx.array(shares))).max(0)
    found = attention(mx.array(queries), mx.array(keys, mx.bfloat16).astype(mx.float32))
    assert np.allclose(attention(mx.array(queries), mx.array(keys)), wanted, atol=1e-6)
    assert found.dtype == mx.float32
