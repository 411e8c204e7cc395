"""Tiny models of every architecture that a short name stands for, quantised as the real ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import tiny
import tiny_tokenizer
import vision_models
from mlx.utils import tree_flatten
from models import encoder_folders

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_GLM: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "rope_scaling": None,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
}
_HYBRID: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.5,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"rope_scaling": None},
    "gemma3_text": {},
    "gpt_oss": {},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 64},
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "glm4_moe": _GLM | {"use_qk_norm": True},
    "glm4_moe_lite": _GLM
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
        "rotary_dim": 16,
    },
}
_CLASSES = {"mistral": "llama", "minimax_m2": "minimax"}
"""Architectures that are run by another's class."""
_NESTED = ("qwen3_5", "qwen3_5_moe")
"""Architectures whose configuration has the text model's in it, and a vision tower's, too."""
GEMMA_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
"""What the text tower of gemma-4-26b-a4b has beside that of the small ones."""


def text_model(architecture: str, folder: Path) -> Path:
    """A model that makes text, in 4 bits."""
    shape = _SIZES | _SHAPES[architecture]
    run_by = _CLASSES.get(architecture, architecture)
    config = tiny.settings(run_by, **shape)
    if architecture in _NESTED:
        config = {"model_type": run_by, "text_config": config | {"model_type": f"{run_by}_text"}}
    model = tiny.model_of(run_by, config)
    nn.quantize(model, group_size=32, bits=4, class_predicate=_is_quantised)
    tiny_tokenizer.write(folder)
    config |= {"model_type": architecture, "quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _is_quantised(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def seeing_model(architecture: str, folder: Path, **text: Any) -> Path:
    return vision_models.write(architecture, folder, **text)


def embedding_model(architecture: str, folder: Path) -> Path:
    if architecture in encoder_folders.FAMILIES:
        return encoder_folders.encoder(folder, architecture)
    made = encoder_folders.decoder(folder, architecture)
    pooling = {"pooling_mode_mean_tokens": True}
    return encoder_folders.sentence(made, modules=[("Pooling", "1_Pooling", pooling)])
