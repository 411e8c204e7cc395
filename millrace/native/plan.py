"""What these kernels make of one of mlx-lm's models: its layers as packed matrices, or why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from millrace.native.emit import LANES
from millrace.native.packing import Array, Packed, Unsupported, floats, pack

_WHOLE = 2 * LANES
"""Heads and rows come in multiples of this."""


@dataclass(frozen=True)
class Angles:
    """How far positions turn a head's pairs."""

    per_place: Array
    factor: float

    def table(self, places: int) -> tuple[Array, Array]:
        angles = np.outer(np.arange(places, dtype=np.float64), self.per_place)
        cosines, sines = np.cos(angles) * self.factor, np.sin(angles) * self.factor
        return cosines.astype(np.float32), sines.astype(np.float32)


@dataclass(frozen=True)
class LayerPlan:
    norm: Array
    queries: Packed
    keys: Packed
    values: Packed
    query_norm: Array | None
    key_norm: Array | None
    window: int
    """How many keys a query looks back at; 0 for all."""
    out: Packed
    feed_norm: Array
    gate: Packed
    up: Packed
    down: Packed


@dataclass(frozen=True)
class Plan:
    hidden: int
    queries: int
    heads: int
    head_size: int
    scale: float
    eps: float
    angles: Angles
    embedding: Packed
    head: Packed
    layers: list[LayerPlan]
    norm: Array

    @property
    def vocabulary(self) -> int:
        return self.head.outputs

    @property
    def intermediate(self) -> int:
        return self.layers[0].gate.outputs

    @property
    def nbytes(self) -> int:
        matrices = [self.embedding, *([self.head] if self.head is not self.embedding else [])]
        for layer in self.layers:
            matrices += [layer.queries, layer.keys, layer.values, layer.out]
            matrices += [layer.gate, layer.up, layer.down]
        return sum(m.nbytes for m in matrices)


def check(model: Any) -> None:
    """Raise Unsupported unless the model can be planned; takes nothing from it."""
    if type(model) not in (llama.Model, qwen2.Model, qwen3.Model):
        raise Unsupported(f"its architecture is {getattr(model, 'model_type', type(model))}")
    args = model.args
    attention = model.layers[0].self_attn
    size = _head_size(attention)
    if size % _WHOLE or args.hidden_size % _WHOLE or args.intermediate_size % _WHOLE:
        raise Unsupported("its rows or heads have no whole number of vectors")
    for width in (attention.n_heads * size, attention.n_kv_heads * size, args.intermediate_size):
        if width % (4 * LANES):
            raise Unsupported("its layers have no whole number of blocks")
    if args.hidden_size % (4 * LANES):
        raise Unsupported("its layers have no whole number of blocks")
    _angles(attention.rope, size)


def plan(model: Any) -> Plan:
    """Pack a model's weights. The model's own are let go of, layer by layer."""
    check(model)
    inner, attention = model.model, model.layers[0].self_attn
    embedding = pack(inner.embed_tokens)
    tied = "lm_head" not in model
    return Plan(
        hidden=model.args.hidden_size,
        queries=attention.n_heads,
        heads=attention.n_kv_heads,
        head_size=_head_size(attention),
        scale=float(attention.scale),
        eps=float(model.args.rms_norm_eps),
        angles=_angles(attention.rope, _head_size(attention)),
        embedding=embedding,
        head=embedding if tied else pack(model.lm_head),
        layers=[_layer(layer, inner) for layer in inner.layers],
        norm=floats(inner.norm.weight),
    )


def _layer(layer: Any, inner: Any) -> LayerPlan:
    attention, feed = layer.self_attn, layer.mlp
    normed = "q_norm" in attention
    sliding = getattr(layer, "use_sliding", False)
    return LayerPlan(
        norm=floats(layer.input_layernorm.weight),
        queries=pack(attention.q_proj),
        keys=pack(attention.k_proj),
        values=pack(attention.v_proj),
        query_norm=floats(attention.q_norm.weight) if normed else None,
        key_norm=floats(attention.k_norm.weight) if normed else None,
        window=inner.sliding_window if sliding else 0,
        out=pack(attention.o_proj),
        feed_norm=floats(layer.post_attention_layernorm.weight),
        gate=pack(feed.gate_proj),
        up=pack(feed.up_proj),
        down=pack(feed.down_proj),
    )


def _head_size(attention: Any) -> int:
    projection = attention.q_proj
    return int(projection["weight"].shape[0]) // int(attention.n_heads)


def _angles(rope: Any, head_size: int) -> Angles:
    dims = getattr(rope, "dims", getattr(rope, "dim", None))
    if dims != head_size or getattr(rope, "traditional", False):
        raise Unsupported("its positions are of a kind that is not known here")
    if type(rope) is nn.RoPE:
        base = rope.base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
        return Angles(rope.scale / base, 1.0)
    if type(rope) in (Llama3RoPE, SuScaledRoPE, YarnRoPE):
        factor = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
        return Angles(1.0 / np.array(rope._freqs.astype(mx.float32), np.float64), float(factor))
    raise Unsupported("its positions are of a kind that is not known here")
