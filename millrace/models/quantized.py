"""Quantised layers as CUDA wants them driven.

MLX's quantised product on CUDA runs an input of shape (rows, 1, width) as that many separate
products, so the leading axes are flattened first (Metal does this by itself). From some number of
rows on, it is faster to widen the weights and use the dense product.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

WIDE = 100
"""Rows from which widening pays."""


class FlatQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """A quantised linear layer over flattened leading axes."""

    @classmethod
    def of(cls, layer: nn.QuantizedLinear) -> FlatQuantizedLinear:
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        for name, value in layer.items():
            new[name] = value
        new.group_size, new.bits, new.mode = layer.group_size, layer.bits, layer.mode
        new.freeze()
        return new

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x.reshape(-1, x.shape[-1]))
        if "bias" in self:
            y = y + self["bias"]
        return y.reshape(*x.shape[:-1], y.shape[-1])


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantised embedding that is also the head, over flattened leading axes."""

    @classmethod
    def of(cls, layer: nn.QuantizedEmbedding) -> FlatQuantizedEmbedding:
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        for name, value in layer.items():
            new[name] = value
        new.group_size, new.bits, new.mode = layer.group_size, layer.bits, layer.mode
        new.num_embeddings, new.dims = layer.num_embeddings, layer.dims
        new.freeze()
        return new

    def as_linear(self, x: mx.array) -> mx.array:
        y = _product(self, x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _product(layer: Any, x: mx.array) -> mx.array:
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    if x.shape[0] >= WIDE:
        wide = mx.dequantize(layer["weight"], layer["scales"], layer.get("biases"), **how)
        return x @ wide.astype(x.dtype).T
    return mx.quantized_matmul(
        x, layer["weight"], layer["scales"], layer.get("biases"), transpose=True, **how
    )


def flatten(model: nn.Module) -> None:
    """Put the flattening layers in place of a model's quantised ones."""

    def swap(_: str, layer: nn.Module) -> nn.Module:
        if type(layer) is nn.QuantizedLinear:
            return FlatQuantizedLinear.of(layer)
        if type(layer) is nn.QuantizedEmbedding:
            return FlatQuantizedEmbedding.of(layer)
        return layer

    leaves = tree_map_with_path(swap, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
