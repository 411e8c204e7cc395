"""What each family's configuration says of its network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.models.encoders.bert import Shape


def shape_of(config: Mapping[str, Any]) -> Shape:
    family = config["model_type"]
    if family == "modernbert":
        return _modern(config)
    if family == "nomic_bert":
        return _nomic(config)
    if family == "distilbert":
        return Shape(
            vocabulary=config["vocab_size"],
            width=config["dim"],
            inner=config["hidden_dim"],
            layers=config["n_layers"],
            heads=config["n_heads"],
            eps=1e-12,
            activation=config.get("activation", "gelu"),
            positions=config["max_position_embeddings"],
        )
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ValueError(f"positions of the kind '{kind}' are not supported")
    width = config["hidden_size"]
    narrow = config.get("embedding_size", width)
    offset = family in ("roberta", "xlm-roberta", "camembert", "mpnet")
    pad = config.get("pad_token_id")
    return Shape(
        vocabulary=config["vocab_size"],
        width=width,
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        eps=config.get("layer_norm_eps", 1e-12),
        activation=config.get("hidden_act", "gelu"),
        narrow=narrow if narrow != width else 0,
        positions=config["max_position_embeddings"],
        first_position=(1 if pad is None else int(pad)) + 1 if offset else 0,
        types=0 if family == "mpnet" else config.get("type_vocab_size", 2),
        buckets=config.get("relative_attention_num_buckets", 32) if family == "mpnet" else 0,
    )


def _modern(config: Mapping[str, Any]) -> Shape:
    count, every = config["num_hidden_layers"], config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [
        "full_attention" if i % every == 0 else "sliding_attention" for i in range(count)
    ]
    wide = [kind == "full_attention" for kind in kinds]
    ropes = config.get("rope_parameters") or {}
    far = ropes.get("full_attention", {}).get(
        "rope_theta", config.get("global_rope_theta", 160000.0)
    )
    near = ropes.get("sliding_attention", {}).get(
        "rope_theta", config.get("local_rope_theta") or 10000.0
    )
    window = config.get("local_attention", 128) // 2
    return Shape(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=count,
        heads=config["num_attention_heads"],
        eps=config.get("norm_eps", 1e-5),
        activation=config.get("hidden_activation", "gelu"),
        bias=config.get("attention_bias", False),
        norm_bias=config.get("norm_bias", False),
        inner_bias=config.get("mlp_bias", False),
        gated=True,
        norms_first=True,
        theta=tuple(far if w else near for w in wide),
        windows=tuple(None if w else window for w in wide),
    )


def _nomic(config: Mapping[str, Any]) -> Shape:
    """In GPT-2's words, as its authors have it, or in those of transformers."""

    def value(*names: str, default: Any = None) -> Any:
        return next((config[n] for n in names if config.get(n) is not None), default)

    if config.get("prenorm") or config.get("rotary_emb_interleaved"):
        raise ValueError("norms that come first and interleaved positions are not supported")
    if value("rotary_emb_fraction", default=1.0) != 1.0:
        raise ValueError("positions that turn a part of a head only are not supported")
    ropes = config.get("rope_parameters") or {}
    layers = value("num_hidden_layers", "n_layer")
    base = float(value("rotary_emb_base", default=ropes.get("rope_theta", 1000.0)))
    return Shape(
        vocabulary=config["vocab_size"],
        width=value("hidden_size", "n_embd"),
        inner=value("intermediate_size", "n_inner"),
        layers=layers,
        heads=value("num_attention_heads", "n_head"),
        eps=value("layer_norm_eps", "layer_norm_epsilon", default=1e-12),
        activation=value("hidden_act", "activation_function", default="silu"),
        types=config.get("type_vocab_size", 2),
        bias=config.get("qkv_proj_bias", False),
        inner_bias=config.get("mlp_fc1_bias", False),
        gated=True,
        theta=(base,) * layers,
    )
