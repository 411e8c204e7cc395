"""Tiny random models of real shapes: every kind of layer state that the engine must carry."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

VOCAB = 128

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 4,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": None,
        "rope_parameters": None,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "time_step_limit": [0.0, 10.0],
        "time_step_rank": "auto",
        "chunk_size": 16,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "intermediate_size": 64,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
    },
    "qwen3_next": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
        "attention_bias": False,
        "num_hidden_layers": 4,
    },
}


def settings(shape: str, **more: Any) -> dict[str, Any]:
    """A model's config.json."""
    return _BASE | {"model_type": shape} | SHAPES.get(shape, {}) | more


def build(shape: str, seed: int = 0, **more: Any) -> Any:
    """A model with random float32 weights, wide enough apart that no two logits tie."""
    return model_of(shape, settings(shape, **more), seed)


def model_of(shape: str, config: dict[str, Any], seed: int = 0) -> Any:
    """The same for a configuration of one's own."""
    module = importlib.import_module(f"mlx_lm.models.{shape}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_spread, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _spread(value: mx.array) -> mx.array:
    if value.ndim < 2:
        return value.astype(mx.float32)
    return mx.random.normal(value.shape) * (2.0 / value.shape[-1] ** 0.5)
