"""Encoders of BERT's kind: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA, MPNet, Nomic, ModernBERT.

One network whose parts are there or not: learnt positions or rotary ones, types, a bias by distance,
a gate, norms before or after. What a family has of them is `Shape`; how its weights are called is
another module's business.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millrace.models.encoders.activations import activation
from millrace.models.encoders.attention import Reach, attend

Pass = Generator[None, None, mx.array]
"""A forward pass, which stops between its parts: others may be served in between."""


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    eps: float
    activation: str = "gelu"
    narrow: int = 0
    """The width of the embeddings, where it is another."""
    positions: int = 0
    """Learnt positions; 0 if there are none."""
    first_position: int = 0
    types: int = 0
    bias: bool = True
    norm_bias: bool = True
    inner_bias: bool = True
    gated: bool = False
    buckets: int = 0
    """Of the bias by distance; 0 if there is none."""
    norms_first: bool = False
    theta: tuple[float, ...] = ()
    """Each layer's base of rotary positions."""
    windows: tuple[int | None, ...] = ()
    """How far each layer sees; all see everything if left out."""


class Embeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.narrow or shape.width
        self.words = nn.Embedding(shape.vocabulary, width)
        if shape.positions:
            self.positions = nn.Embedding(shape.positions, width)
        if shape.types:
            self.types = nn.Embedding(shape.types, width)
        self.norm = nn.LayerNorm(width, eps=shape.eps, bias=shape.norm_bias)
        if shape.narrow:
            self.widen = nn.Linear(width, shape.width)
        self._shape = shape

    def __call__(self, tokens: mx.array, types: mx.array | None) -> mx.array:
        shape = self._shape
        found = self.words(tokens)
        if shape.positions:
            places = mx.arange(tokens.shape[1]) + shape.first_position
            found = found + self.positions(places)
        if shape.types:
            is_told = types is not None and shape.types > 1
            found = found + self.types(types if is_told else mx.zeros_like(tokens))
        found = self.norm(found)
        return self.widen(found) if shape.narrow else found


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        width = shape.width
        self.query = nn.Linear(width, width, bias=shape.bias)
        self.key = nn.Linear(width, width, bias=shape.bias)
        self.value = nn.Linear(width, width, bias=shape.bias)
        self.out = nn.Linear(width, width, bias=shape.bias)
        self.up = nn.Linear(width, shape.inner, bias=shape.inner_bias)
        if shape.gated:
            self.gate = nn.Linear(width, shape.inner, bias=shape.inner_bias)
        self.down = nn.Linear(shape.inner, width, bias=shape.inner_bias)
        # ModernBERT's first layer follows the embeddings' own norm, and has none.
        if not (shape.norms_first and number == 0):
            self.attention_norm = nn.LayerNorm(width, eps=shape.eps, bias=shape.norm_bias)
        self.output_norm = nn.LayerNorm(width, eps=shape.eps, bias=shape.norm_bias)
        self._heads = shape.heads
        self._gated = shape.gated
        self._norms_first = shape.norms_first
        self._theta = shape.theta[number] if shape.theta else None
        self._activation = activation(shape.activation)

    def __call__(self, x: mx.array, reach: Reach, bias: mx.array | None) -> mx.array:
        if self._norms_first:
            norm: Any = self.get("attention_norm")
            x = x + self._attention(x if norm is None else norm(x), reach, bias)
            return x + self._inner(self.output_norm(x))
        x = self.attention_norm(x + self._attention(x, reach, bias))
        return self.output_norm(x + self._inner(x))

    def _attention(self, x: mx.array, reach: Reach, bias: mx.array | None) -> mx.array:
        rows, length, width = x.shape

        def heads(y: mx.array) -> mx.array:
            return y.reshape(rows, length, self._heads, -1).transpose(0, 2, 1, 3)

        queries, keys, values = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self._theta is not None:
            queries, keys = self._turned(queries), self._turned(keys)
        found = attend(queries, keys, values, reach, bias=bias)
        return self.out(found.transpose(0, 2, 1, 3).reshape(rows, length, width))

    def _turned(self, x: mx.array) -> mx.array:
        turned: mx.array = mx.fast.rope(
            x, x.shape[-1], traditional=False, base=self._theta, scale=1.0, offset=0
        )
        return turned

    def _inner(self, x: mx.array) -> mx.array:
        if self._gated:
            return self.down(self._activation(self.gate(x)) * self.up(x))
        return self.down(self._activation(self.up(x)))


class BertNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.layers = [Layer(shape, number) for number in range(shape.layers)]
        if shape.buckets:
            self.distances = nn.Embedding(shape.buckets, shape.heads)
        if shape.norms_first:
            self.final_norm = nn.LayerNorm(shape.width, eps=shape.eps, bias=shape.norm_bias)
        self.shape = shape

    def states(self, tokens: mx.array, lengths: list[int], types: mx.array | None) -> Pass:
        """The last states of (rows, tokens), of which each row has as many as `lengths` says."""
        shape, length = self.shape, tokens.shape[1]
        x = self.embeddings(tokens, types)
        uneven = mx.array(lengths) if min(lengths) < length else None
        bias = self._bias(length) if shape.buckets else None
        for number, layer in enumerate(self.layers):
            window = shape.windows[number] if shape.windows else None
            x = layer(x, Reach(uneven, window), bias)
            mx.async_eval(x)
            yield
        return self.final_norm(x) if shape.norms_first else x

    def _bias(self, length: int) -> mx.array:
        """What is added to scores by how far apart two tokens are: (heads, tokens, tokens)."""
        place = mx.arange(length)
        found = self.distances(_bucket(place[None] - place[:, None], self.shape.buckets))
        return found.transpose(2, 0, 1)


_FURTHEST = 128


def _bucket(ahead: mx.array, buckets: int) -> mx.array:
    """Near distances have a bucket each, far ones share; those ahead come after those behind."""
    half = buckets // 2
    exact = half // 2
    away = mx.abs(ahead)
    far = mx.log(mx.maximum(away, 1).astype(mx.float32) / exact) / math.log(_FURTHEST / exact)
    shared = mx.minimum(exact + (far * (half - exact)).astype(mx.int32), half - 1)
    return mx.where(ahead > 0, half, 0) + mx.where(away < exact, away, shared)
