"""Tiny shapes of models whose state or attention is of its own kind, beside those of `tiny.SHAPES`."""

from __future__ import annotations

from typing import Any

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

OWN_KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "llama4": {
        "text_config": {
            "attention_bias": False,
            "attention_chunk_size": 16,
            "head_dim": 8,
            "hidden_size": 32,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "max_position_embeddings": 4096,
            "model_type": "llama4",
            "num_attention_heads": 4,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "vocab_size": 128,
        }
    },
    "falcon_h1": {
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "conv1d_width": 4,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "baichuan_m1": {
        "sliding_window": 16,
        "sliding_window_layers": [0],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_hidden_layers": 4,
    },
    "cohere2": {"sliding_window": 16, "num_hidden_layers": 4, "layer_norm_eps": 1e-5},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
