"""What these kernels make of one of mlx-lm's models: its layers as packed matrices, or why they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from millrace.native.attention import MOST_QUERIES
from millrace.native.emit import LANES
from millrace.native.formats import Format
from millrace.native.packing import (
    SIDE_BY_SIDE,
    Array,
    Compact,
    PackedMatrix,
    Packer,
    UnsupportedByKernels,
    check_layer,
    floats,
)

_WHOLE = 2 * LANES
"""Heads and rows come in multiples of this."""


@dataclass(frozen=True)
class Angles:
    """How far positions turn a head's pairs."""

    per_place: tuple[float, ...]
    factor: float

    def table(self, places: int) -> tuple[Array, Array]:
        angles = np.outer(np.arange(places, dtype=np.float64), self.per_place)
        cosines, sines = np.cos(angles) * self.factor, np.sin(angles) * self.factor
        return cosines.astype(np.float32), sines.astype(np.float32)


@dataclass(frozen=True)
class LayerPlan:
    norm: Array
    queries: PackedMatrix
    keys: PackedMatrix
    values: PackedMatrix
    query_norm: Array | None
    key_norm: Array | None
    window: int
    """How many keys a query looks back at; 0 for all."""
    angles: int
    """Which of the plan's angles are its own."""
    out: PackedMatrix
    out_norm: Array | None
    feed_norm: Array
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    down_norm: Array | None


@dataclass(frozen=True)
class Plan:
    hidden: int
    queries: int
    heads: int
    head_size: int
    scale: float
    eps: float
    angles: list[Angles]
    activation: Literal["silu", "gelu"]
    embedding: PackedMatrix
    embedding_factor: float
    head: PackedMatrix
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
    if type(model) not in (llama.Model, qwen2.Model, qwen3.Model, gemma3_text.Model):
        raise UnsupportedByKernels(
            f"its architecture is {getattr(model, 'model_type', type(model))}"
        )
    args = model.args
    attention = model.layers[0].self_attn
    size = _head_size(attention)
    if size % _WHOLE:
        raise UnsupportedByKernels(f"its heads have {size} numbers")
    widths = (args.hidden_size, args.intermediate_size, attention.n_kv_heads * size)
    if any(width % SIDE_BY_SIDE for width in (*widths, attention.n_heads * size)):
        raise UnsupportedByKernels(f"its layers' widths are no multiples of {SIDE_BY_SIDE}")
    for layer in model.layers:
        _angles(layer.self_attn.rope, size)
    if attention.n_heads // attention.n_kv_heads > MOST_QUERIES:
        raise UnsupportedByKernels("more of its heads share a key than an item of attention holds")
    for matrix in _matrices(model):
        check_layer(matrix)


def _matrices(model: Any) -> Iterator[Any]:
    """The layers whose weights are packed."""
    yield model.model.embed_tokens
    if "lm_head" in model:
        yield model.lm_head
    for layer in model.layers:
        attention, feed = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (feed.gate_proj, feed.up_proj, feed.down_proj)


def plan(
    model: Any,
    compact: dict[str, Compact] | None = None,
    note: Callable[[float], None] = lambda share: None,
    found: Callable[[Format], None] = lambda form: None,
) -> Plan:
    """Pack a model's weights. The model's own are let go of, layer by layer; `note` hears how far it is,
    and `found` which formats there are.

    Those of which there is a compact form, by their module's name, are not even read; it is taken out of
    what is given, so that nothing is held twice.
    """
    check(model)
    pack = Packer(model, compact or {}, found).pack
    inner, attention = model.model, model.layers[0].self_attn
    size = _head_size(attention)
    gemma = type(model) is gemma3_text.Model
    ropes = [_angles(layer.self_attn.rope, size) for layer in inner.layers]
    angles = list(dict.fromkeys(ropes))
    factor = 1.0
    if gemma:
        # The model rounds it, so that is part of it.
        factor = float(mx.array(model.args.hidden_size**0.5, mx.bfloat16).astype(mx.float32))
    embedding = pack(inner.embed_tokens)
    return Plan(
        hidden=model.args.hidden_size,
        queries=attention.n_heads,
        heads=attention.n_kv_heads,
        head_size=size,
        scale=float(attention.scale),
        eps=float(model.args.rms_norm_eps),
        angles=angles,
        activation="gelu" if gemma else "silu",
        embedding=embedding,
        embedding_factor=factor,
        head=pack(model.lm_head) if "lm_head" in model else embedding,
        layers=[
            _layer(layer, _window(model, number), angles.index(ropes[number]), pack)
            for number, layer in enumerate(_heard(inner.layers, note))
        ],
        norm=_norm(inner.norm),
    )


def _heard(layers: Sequence[Any], note: Callable[[float], None]) -> Iterator[Any]:
    for number, layer in enumerate(layers):
        note(number / len(layers))
        yield layer


def _layer(layer: Any, window: int, angles: int, pack: Callable[[Any], PackedMatrix]) -> LayerPlan:
    attention, feed = layer.self_attn, layer.mlp
    normed = "q_norm" in attention
    # With four norms to a layer, the second is of what attention gives and not of what it leaves.
    four = "pre_feedforward_layernorm" in layer
    before_feed = layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm
    return LayerPlan(
        norm=_norm(layer.input_layernorm),
        queries=pack(attention.q_proj),
        keys=pack(attention.k_proj),
        values=pack(attention.v_proj),
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        window=window,
        angles=angles,
        out=pack(attention.o_proj),
        out_norm=_norm(layer.post_attention_layernorm) if four else None,
        feed_norm=_norm(before_feed),
        gate=pack(feed.gate_proj),
        up=pack(feed.up_proj),
        down=pack(feed.down_proj),
        down_norm=_norm(layer.post_feedforward_layernorm) if four else None,
    )


def _window(model: Any, number: int) -> int:
    if type(model) is gemma3_text.Model:
        pattern = model.args.sliding_window_pattern
        return 0 if number % pattern == pattern - 1 else int(model.args.sliding_window)
    sliding = getattr(model.layers[number], "use_sliding", False)
    return int(model.model.sliding_window) if sliding else 0


def _norm(layer: Any) -> Array:
    weight = floats(layer.weight)
    return weight + np.float32(1) if type(layer) is gemma3_text.RMSNorm else weight


def _head_size(attention: Any) -> int:
    return int(attention.q_proj["weight"].shape[0]) // int(attention.n_heads)


def _angles(rope: Any, head_size: int) -> Angles:
    dims = getattr(rope, "dims", getattr(rope, "dim", None))
    if dims != head_size or getattr(rope, "traditional", False):
        raise UnsupportedByKernels("its positions are of a kind that is not known here")
    if type(rope) is nn.RoPE:
        base = rope.base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
        return Angles(tuple(rope.scale / base), 1.0)
    if type(rope) in (Llama3RoPE, SuScaledRoPE, YarnRoPE):
        factor = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
        periods = np.array(rope._freqs.astype(mx.float32), np.float64)
        return Angles(tuple(1.0 / periods), float(factor))
    raise UnsupportedByKernels("its positions are of a kind that is not known here")
