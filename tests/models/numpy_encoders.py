"""Forward passes of encoders in plain numpy and float64, one text at a time: what is right.

Written from the families' published definitions, over the names in their files; shares nothing with
the code under test.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

_erf = np.vectorize(math.erf)


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def norm(w: Weights, name: str, x: Array, eps: float) -> Array:
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return np.asarray(y * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0))


def linear(w: Weights, name: str, x: Array) -> Array:
    return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))


def softmax(x: Array) -> Array:
    y = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(y / y.sum(-1, keepdims=True))


def attention(
    q: Array, k: Array, v: Array, heads: int, *, bias: Any = 0.0, allowed: Array | None = None
) -> Array:
    length, size = len(q), q.shape[1] // heads
    split = [x.reshape(length, heads, size).transpose(1, 0, 2) for x in (q, k, v)]
    scores = split[0] @ split[1].transpose(0, 2, 1) / math.sqrt(size) + bias
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    return np.asarray((softmax(scores) @ split[2]).transpose(1, 0, 2).reshape(length, -1))


def rotated(x: Array, heads: int, theta: float) -> Array:
    length, size = len(x), x.shape[1] // heads
    half = size // 2
    angle = np.arange(length)[:, None] * theta ** (-np.arange(half) * 2.0 / size)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    y = x.reshape(length, heads, size)
    a, b = y[..., :half], y[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).reshape(length, -1)


def bert(
    w: Weights,
    config: dict[str, Any],
    ids: list[int],
    types: list[int] | None = None,
    prefix: str = "",
) -> Array:
    """BERT, RoBERTa, XLM-RoBERTa."""
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]
    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    at = f"{prefix}embeddings."
    x = w[f"{at}word_embeddings.weight"][ids]
    x = x + w[f"{at}position_embeddings.weight"][np.arange(len(ids)) + first]
    x = x + w[f"{at}token_type_embeddings.weight"][types or [0] * len(ids)]
    x = norm(w, f"{at}LayerNorm", x, eps)
    for n in range(config["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{n}."
        q, k, v = (linear(w, f"{at}attention.self.{p}", x) for p in ("query", "key", "value"))
        y = linear(w, f"{at}attention.output.dense", attention(q, k, v, heads))
        x = norm(w, f"{at}attention.output.LayerNorm", x + y, eps)
        y = linear(w, f"{at}output.dense", gelu(linear(w, f"{at}intermediate.dense", x)))
        x = norm(w, f"{at}output.LayerNorm", x + y, eps)
    return x


def distilbert(w: Weights, config: dict[str, Any], ids: list[int]) -> Array:
    eps = 1e-12
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][np.arange(len(ids))]
    x = norm(w, "embeddings.LayerNorm", x, eps)
    for n in range(config["n_layers"]):
        at = f"transformer.layer.{n}."
        q, k, v = (linear(w, f"{at}attention.{p}_lin", x) for p in "qkv")
        y = linear(w, f"{at}attention.out_lin", attention(q, k, v, config["n_heads"]))
        x = norm(w, f"{at}sa_layer_norm", x + y, eps)
        y = linear(w, f"{at}ffn.lin2", gelu(linear(w, f"{at}ffn.lin1", x)))
        x = norm(w, f"{at}output_layer_norm", x + y, eps)
    return x


def mpnet(w: Weights, config: dict[str, Any], ids: list[int]) -> Array:
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][np.arange(len(ids)) + 2]
    x = norm(w, "embeddings.LayerNorm", x, eps)
    buckets = np.array([[_bucket(k - q) for k in range(len(ids))] for q in range(len(ids))])
    bias = w["encoder.relative_attention_bias.weight"][buckets].transpose(2, 0, 1)
    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{n}."
        q, k, v = (linear(w, f"{at}attention.attn.{p}", x) for p in "qkv")
        y = linear(w, f"{at}attention.attn.o", attention(q, k, v, heads, bias=bias))
        x = norm(w, f"{at}attention.LayerNorm", x + y, eps)
        y = linear(w, f"{at}output.dense", gelu(linear(w, f"{at}intermediate.dense", x)))
        x = norm(w, f"{at}output.LayerNorm", x + y, eps)
    return x


def _bucket(ahead: int) -> int:
    """T5's buckets: 16 for those behind and 16 for those ahead, half of each for one distance."""
    base, away = (16 if ahead > 0 else 0), abs(ahead)
    if away < 8:
        return base + away
    return base + min(15, 8 + int(math.log(away / 8) / math.log(128 / 8) * 8))


def nomic_bert(w: Weights, config: dict[str, Any], ids: list[int]) -> Array:
    eps, heads, theta = 1e-12, config["n_head"], config["rotary_emb_base"]
    x = (
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm(w, "emb_ln", x, eps)
    for n in range(config["n_layer"]):
        at = f"encoder.layers.{n}."
        q, k, v = np.split(linear(w, f"{at}attn.Wqkv", x), 3, axis=1)
        y = attention(rotated(q, heads, theta), rotated(k, heads, theta), v, heads)
        x = norm(w, f"{at}norm1", x + linear(w, f"{at}attn.out_proj", y), eps)
        y = linear(w, f"{at}mlp.fc11", x) * silu(linear(w, f"{at}mlp.fc12", x))
        x = norm(w, f"{at}norm2", x + linear(w, f"{at}mlp.fc2", y), eps)
    return x


def modernbert(w: Weights, config: dict[str, Any], ids: list[int], prefix: str = "") -> Array:
    eps, heads = config["norm_eps"], config["num_attention_heads"]
    x = norm(
        w, f"{prefix}embeddings.norm", w[f"{prefix}embeddings.tok_embeddings.weight"][ids], eps
    )
    place = np.arange(len(ids))
    near = np.abs(place[:, None] - place) <= config["local_attention"] // 2
    for n in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{n}."
        wide = n % config["global_attn_every_n_layers"] == 0
        theta = config["global_rope_theta"] if wide else config["local_rope_theta"]
        y = norm(w, f"{at}attn_norm", x, eps) if n else x
        q, k, v = np.split(linear(w, f"{at}attn.Wqkv", y), 3, axis=1)
        q, k = rotated(q, heads, theta), rotated(k, heads, theta)
        seen = attention(q, k, v, heads, allowed=None if wide else near)
        x = x + linear(w, f"{at}attn.Wo", seen)
        first, second = np.split(
            linear(w, f"{at}mlp.Wi", norm(w, f"{at}mlp_norm", x, eps)), 2, axis=1
        )
        x = x + linear(w, f"{at}mlp.Wo", gelu(first) * second)
    return norm(w, f"{prefix}final_norm", x, eps)


def rms(x: Array, weight: Array, eps: float, plus: float = 0.0) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (weight + plus))


def decoder(w: Weights, config: dict[str, Any], ids: list[int]) -> Array:
    """Qwen 3, or Gemma 3 that looks both ways: states after the last norm."""
    gemma = config["model_type"] == "gemma3_text"
    plus, eps, size = (1.0 if gemma else 0.0), config["rms_norm_eps"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    length, place = len(ids), np.arange(len(ids))
    x = w["embed_tokens.weight"][ids]
    if gemma:
        x = x * float(np.float32(_bfloat16(config["hidden_size"] ** 0.5)))
    for n in range(config["num_hidden_layers"]):
        at = f"layers.{n}."
        y = rms(x, w[f"{at}input_layernorm.weight"], eps, plus)
        q = linear(w, f"{at}self_attn.q_proj", y).reshape(length, heads, size)
        k = linear(w, f"{at}self_attn.k_proj", y).reshape(length, groups, size)
        v = linear(w, f"{at}self_attn.v_proj", y).reshape(length, groups, size)
        q = rms(q, w[f"{at}self_attn.q_norm.weight"], eps, plus).reshape(length, -1)
        k = rms(k, w[f"{at}self_attn.k_norm.weight"], eps, plus).reshape(length, -1)
        theta, allowed = config["rope_theta"], place[:, None] >= place
        if gemma:
            wide = (n + 1) % config["sliding_window_pattern"] == 0
            theta = config["rope_theta"] if wide else config["rope_local_base_freq"]
            reach = length if wide else config["sliding_window"] // 2 + 1
            allowed = np.abs(place[:, None] - place) < reach
        q, k = rotated(q, heads, theta), rotated(k, groups, theta)
        k = np.repeat(k.reshape(length, groups, size), heads // groups, 1).reshape(length, -1)
        v = np.repeat(v, heads // groups, 1).reshape(length, -1)
        y = linear(w, f"{at}self_attn.o_proj", attention(q, k, v, heads, allowed=allowed))
        if gemma:
            x = x + rms(y, w[f"{at}post_attention_layernorm.weight"], eps, 1.0)
            y = rms(x, w[f"{at}pre_feedforward_layernorm.weight"], eps, 1.0)
            gate = linear(w, f"{at}mlp.gate_proj", y)
            gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            y = linear(w, f"{at}mlp.down_proj", gate * linear(w, f"{at}mlp.up_proj", y))
            x = x + rms(y, w[f"{at}post_feedforward_layernorm.weight"], eps, 1.0)
        else:
            x = x + y
            y = rms(x, w[f"{at}post_attention_layernorm.weight"], eps)
            y = silu(linear(w, f"{at}mlp.gate_proj", y)) * linear(w, f"{at}mlp.up_proj", y)
            x = x + linear(w, f"{at}mlp.down_proj", y)
    return rms(x, w["norm.weight"], eps, plus)


def _bfloat16(value: float) -> float:
    bits = np.float32(value).view(np.uint32)
    rounded = (int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))


STATES = {
    "bert": bert,
    "xlm-roberta": bert,
    "distilbert": distilbert,
    "mpnet": mpnet,
    "nomic_bert": nomic_bert,
    "modernbert": modernbert,
}


def unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x))
