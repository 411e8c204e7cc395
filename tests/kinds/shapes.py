"""A tiny configuration for every kind of model that the installed mlx-lm has a file for.

It is generated from the fields of the kind's own argument class: a number for each name that is known, the
class's default for what is not. `OWN` has what single kinds need besides.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import mlx_lm.models
from paging.own_kinds import OWN_KINDS
from tiny import SHAPES

VOCAB = 128
LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "hidden_dim": 32,
    "d_model": 32,
    "model_dim": 32,
    "n_embd": 32,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "shared_intermediate_size": 64,
    "expert_ffn_hidden_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 4096,
    "n_positions": 4096,
    "n_ctx": 4096,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qk_norm": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "num_shared_expert": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "sliding_window_pattern": 2,
    "attention_window_size": 16,
    "partial_rotary_factor": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 8,
    "state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "time_step_rank": "auto",
    "time_step_limit": [0.0, 10.0],
    "chunk_size": 16,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "query_pre_attn_scalar": 8,
    "model_max_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "post_norm": False,
    "qk_norm": True,
    "num_kv_reuse_layers": 2,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "rotary_dim": 8,
    "use_expert_bias": True,
    "num_dense_layers": 1,
    "block_size": 4096,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 1,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "use_qkv_bias": False,
    "linear_allow_neg_eigval": True,
    "num_attention_groups": 2,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "final_logit_softcapping": 30.0,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
    "swa_rope_theta": 10000.0,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "moe_top_k": 2,
    "share_expert_dim": 32,
    "num_experts_per_token": 2,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "rope_local_base_freq": 10000.0,
    "kv_channels": 8,
    "seq_length": 4096,
    "global_head_dim": 8,
    "post_norm_eps": 1e-5,
    "output_multiplier": 1.0,
}
"""By the name of a field, in every class that has it."""

_BY_LAYER_TYPE = {
    kind: {"rope_theta": 10000.0, "rope_type": "default"}
    for kind in ("sliding_attention", "full_attention")
}
_DELTA_ATTENTION = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
}
_LLAMA_4_SCALING = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 512,
}


OWN: dict[str, dict[str, Any]] = {
    **SHAPES,
    **OWN_KINDS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gptj": {"rotary_dim": 8, "head_dim": 8},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "kimi_linear": _DELTA_ATTENTION,
    "kimi_k3": {"text_config": _DELTA_ATTENTION},
    "lfm2-vl": {"text_config": OWN_KINDS["lfm2"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "lille-130m": {"n_embd": 256, "n_head": 4, "n_kv_heads": 2},
    "mellum": {"rope_parameters": _BY_LAYER_TYPE},
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1]},
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0, 1, 1, 1]}},
    "ministral3": {"rope_parameters": _LLAMA_4_SCALING},
    "mistral4": {"rope_parameters": _LLAMA_4_SCALING},
    "muse_spark": {
        "text_config": {
            "layer_rope_theta": [10000.0] * LAYERS,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        }
    },
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "M"]},
    "olmo3": {"num_hidden_layers": LAYERS},
    "openelm": {
        "num_transformer_layers": LAYERS,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
        "vocab_size": 100_352,
    },
    "plamo": {"num_key_value_heads": 1, "n_shared_head": 2},
    "qwen": {"kv_channels": 8},
    "spark2_5": {"rope_parameters": _BY_LAYER_TYPE},
}


def kinds() -> list[str]:
    """The kinds of models that mlx-lm has a file for."""
    folder = Path(mlx_lm.models.__path__[0])
    found = sorted(path.stem for path in folder.glob("*.py"))
    return [name for name in found if "class Model(" in (folder / f"{name}.py").read_text("utf-8")]


def config_of(kind: str) -> dict[str, Any]:
    """A tiny config.json of a kind."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    found: dict[str, Any] = {"model_type": kind, **_fields(module.ModelArgs)}
    own = OWN.get(kind, {})
    if "text_config" in found or "text_config" in own:
        inner = next(
            (getattr(module, n) for n in ("TextArgs", "TextConfig") if hasattr(module, n)), None
        )
        text = _fields(inner) if inner is not None else dict(_SIZES)
        text = {"model_type": kind, **text}
        found["text_config"] = {**text, **own.get("text_config", {})}
    return found | {name: value for name, value in own.items() if name != "text_config"}


def _fields(arguments: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(arguments)]
    return {name: _SIZES.get(name) for name in names if name in _SIZES or name == "text_config"}
