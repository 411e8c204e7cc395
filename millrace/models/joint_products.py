"""Linear layers that read the same input, computed as one product.

A GPU takes less time for one product with many outputs than for several with few, and fewer operations are
launched. Queries, keys and values of an attention layer are such layers, gate and up of a feed-forward one.
Their modules stay where they are, so that adapters and whatever looks for them find them; each is a part of
a joint product, which runs when the first of them is called and is kept until the last one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millrace.models.quantized import FlatQuantizedLinear

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names by which mlx-lm's modules call the layers that read the same input."""


class JointProduct:
    """One product for several layers."""

    def __init__(self, layer: Any, sizes: Sequence[int]) -> None:
        self._layer = layer
        self._borders = list(accumulate(sizes))[:-1]
        self._input: mx.array | None = None
        self._outputs: list[mx.array | None] = []

    def part(self, x: mx.array, index: int) -> mx.array:
        """The outputs of one of the layers; of all if it is the first that is called with this input."""
        found = self._outputs[index] if self._input is x else None
        if found is None:
            self._input = x
            self._outputs = list(mx.split(self._layer(x), self._borders, axis=-1))
            found = self._outputs[index]
            assert found is not None
        self._outputs[index] = None
        if not any(output is not None for output in self._outputs):
            self._input = None
        return found


class JointLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that is a part of a joint product; its weights are a part of that one's."""

    joint: JointProduct
    index: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.joint.part(x, self.index)


class JointQuantizedLinear(FlatQuantizedLinear):
    """A quantised linear layer that is a part of a joint product."""

    joint: JointProduct
    index: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.joint.part(x, self.index)


_KINDS: dict[type, type] = {nn.Linear: JointLinear, FlatQuantizedLinear: JointQuantizedLinear}


def join_products(model: nn.Module) -> None:
    """Have a model's layers that read the same input be parts of joint products, where they are alike."""
    for module in model.modules():
        for names in _TOGETHER:
            layers = [module.get(name) for name in names]
            if _alike(layers):
                for name, part in zip(names, _joined(layers), strict=True):
                    setattr(module, name, part)


def _alike(layers: Sequence[Any]) -> bool:
    first = layers[0]
    if type(first) not in _KINDS or any(type(layer) is not type(first) for layer in layers):
        return False
    shapes = [{n: (a.shape[1:], a.dtype) for n, a in layer.items()} for layer in layers]
    ways = [[getattr(each, n, None) for n in ("group_size", "bits", "mode")] for each in layers]
    return all(s == shapes[0] for s in shapes) and all(w == ways[0] for w in ways)


def _joined(layers: Sequence[Any]) -> Iterator[Any]:
    sizes = [int(layer["weight"].shape[0]) for layer in layers]
    whole = _copy(layers[0], type(layers[0]))
    for name in layers[0]:
        whole[name] = mx.concatenate([layer[name] for layer in layers])
    mx.eval(whole.parameters())
    joint, begin = JointProduct(whole, sizes), 0
    for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        part = _copy(layer, _KINDS[type(layer)])
        for name in layer:
            part[name] = whole[name][begin : begin + size]
        mx.eval(part.parameters())
        part.joint, part.index = joint, index
        yield part
        begin += size


def _copy(layer: Any, kind: Any) -> Any:
    """A layer of this kind, without weights, that is quantised as another is."""
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    for name in ("group_size", "bits", "mode"):
        if hasattr(layer, name):
            setattr(new, name, getattr(layer, name))
    new.freeze()
    return new
