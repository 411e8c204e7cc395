"""Models that are not run as a whole: their quantised layers are our own, the rest is MLX's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from millrace.config import EngineConfig
from millrace.engine.runner import Runner, SequenceRun
from millrace.models import load, placement
from millrace.native.linear import OwnEmbedding, OwnLinear

_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_GPT2 = {
    "n_ctx": 256,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 500,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {**_SHAPE, "original_max_position_embeddings": 4096},
    "gemma2": _SHAPE,
    "olmo2": _SHAPE,
    "qwen2_moe": {**_SHAPE, **_EXPERTS},
    "gpt2": _GPT2,
}


def _quantized(name: str) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({**CONFIGS[name], "model_type": name}))
    mx.random.seed(2)
    model.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.1, model.parameters()))
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda _, layer: (
            hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0
        ),
    )
    mx.eval(model.parameters())
    return model


def _placed(name: str) -> Any:
    return placement.place(_quantized(name), "auto", "cpu")


def _logits(model: Any, tokens: mx.array) -> np.ndarray[Any, Any]:
    return np.array(model(tokens, cache=make_prompt_cache(model)))


_TOKENS = mx.array(np.random.default_rng(0).integers(0, 500, (2, 45)))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_our_layers_is_the_model(name: str) -> None:
    wide = placement.place(_quantized(name), "f32", "cpu")
    own = _placed(name)
    ours = [m for m in own.modules() if isinstance(m, OwnLinear)]
    assert any(isinstance(m, OwnEmbedding) for m in ours) and len(ours) > 4
    wanted = _logits(wide, _TOKENS)
    np.testing.assert_allclose(_logits(own, _TOKENS), wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_row_gives_the_same_bits_in_any_company() -> None:
    own = _placed("olmo2")
    layer = own.model.layers[0].mlp.gate_proj
    x = mx.array(np.random.default_rng(1).standard_normal((40, 128)).astype(np.float32))
    together = np.array(layer(x))
    for count in (1, 2, 3, 7, 13):
        assert np.array_equal(np.array(layer(x[:count])), together[:count])


def test_a_pass_spares_the_head_of_tokens_whose_logits_nobody_wants() -> None:
    own = _placed("olmo2")
    runner = Runner(own)
    sizes: list[int] = []
    head = own.model.embed_tokens
    rows = own.own_products.rows
    own.own_products.rows = lambda matrix, x: (
        (sizes.append(len(x)) if matrix is head._matrix else None) or rows(matrix, x)
    )
    tokens = mx.arange(40, dtype=mx.int32)
    runner.begin(1)
    assert runner.run(tokens, [SequenceRun(1, 40)], []) is None
    runner.wait()
    assert sum(sizes) <= 1
    sizes.clear()
    runner.begin(2)
    scored = runner.run(tokens, [SequenceRun(2, 40)], [7, 39])
    assert scored is not None and scored.shape == (2, 500)
    mx.eval(scored)
    assert sizes == [2]


def test_a_model_that_our_layers_do_not_suit_is_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = _quantized("olmo2")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {**CONFIGS["olmo2"], "model_type": "olmo2"}
    config["quantization"] = {"group_size": 32, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def broken(*_: object) -> mx.array:
        raise AttributeError("no weight here")

    monkeypatch.setattr(OwnLinear, "__call__", broken)
    loaded = load.load(EngineConfig(model=str(tmp_path), name="m"))
    assert not loaded.native
    assert "do not suit it: no weight here" in caplog.text
