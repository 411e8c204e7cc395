"""From a layer's arrays to packed memory: sixteen outputs side by side, group after group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from millrace.native.emit import LANES
from millrace.native.formats import DENSE_GROUP, Format

Array = npt.NDArray[Any]
SIDE_BY_SIDE = 4 * LANES
"""Outputs are padded to a multiple of this."""


class Unsupported(Exception):
    """Why a model is not run by these kernels."""


@dataclass(frozen=True)
class Packed:
    """A matrix in memory."""

    form: Format
    data: Array
    outputs: int
    inputs: int
    bias: Array | None = None

    @property
    def blocks(self) -> int:
        return int(self.data.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self.data.shape[1] * self.data.shape[2])

    @property
    def groups(self) -> int:
        return int(self.data.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes) + (self.bias.nbytes if self.bias is not None else 0)


def check_layer(layer: Any) -> None:
    """Raise Unsupported unless the layer can be packed."""
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        if layer.mode != "affine":
            raise Unsupported(f"weights are quantised as {layer.mode}")
        if layer.group_size % DENSE_GROUP:
            raise Unsupported(f"weights are quantised in groups of {layer.group_size}")
        _scale_kind(layer["scales"].dtype)
    elif type(layer) in (nn.Linear, nn.Embedding):
        if layer["weight"].shape[1] % DENSE_GROUP:
            raise Unsupported(f"a matrix has {layer['weight'].shape[1]} inputs")
        _scale_kind(layer["weight"].dtype)
    else:
        raise Unsupported(f"a layer is {type(layer).__name__}")


def pack(layer: Any) -> Packed:
    """A linear or embedding layer's matrix; its own arrays are let go of."""
    check_layer(layer)
    packed = _quantized(layer) if "scales" in layer else _dense(layer["weight"])
    bias = floats(layer["bias"]) if "bias" in layer else None
    for name in ("weight", "scales", "biases"):
        if name in layer:
            layer[name] = mx.zeros((0,))
    if bias is None:
        return packed
    padded = np.zeros(packed.blocks * LANES, np.float32)
    padded[: bias.size] = bias
    return Packed(packed.form, packed.data, packed.outputs, packed.inputs, padded)


def floats(values: mx.array) -> npt.NDArray[np.float32]:
    """A copy of some values as numpy's floats."""
    return np.array(values.astype(mx.float32), dtype=np.float32)


def _quantized(layer: Any) -> Packed:
    group, bits = layer.group_size, layer.bits
    weight, scales, biases = layer["weight"], layer["scales"], layer["biases"]
    outputs, inputs = scales.shape[0], scales.shape[1] * group
    form = Format("u4" if bits <= 4 else "u8", group, _scale_kind(scales.dtype), biased=True)
    if bits in (4, 8):
        words = np.array(weight, copy=False)
    else:
        # Other widths are written out: the codes are what is left without scales.
        codes = mx.dequantize(
            weight,
            mx.ones(scales.shape, mx.float32),
            mx.zeros(scales.shape, mx.float32),
            group_size=group,
            bits=bits,
        ).astype(mx.uint32)
        count = form.per_word
        shifts = mx.arange(count, dtype=mx.uint32) * (32 // count)
        words = np.array((codes.reshape(outputs, -1, count) << shifts).sum(-1).astype(mx.uint32))
    data = _blocks(form, outputs, inputs)
    _put(data, form.head_bytes, words, outputs, inputs // group)
    _put(data, 0, _raw(scales), outputs, inputs // group)
    _put(data, form.scale_bytes, _raw(biases), outputs, inputs // group)
    return Packed(form, data, outputs, inputs)


def _dense(weight: mx.array) -> Packed:
    outputs, inputs = weight.shape
    form = Format(_scale_kind(weight.dtype))  # type: ignore[arg-type]
    data = _blocks(form, outputs, inputs)
    _put(data, 0, _raw(weight), outputs, inputs // DENSE_GROUP)
    return Packed(form, data, outputs, inputs)


def _scale_kind(dtype: mx.Dtype) -> Any:
    kinds = {mx.float16: "f16", mx.bfloat16: "bf16", mx.float32: "f32"}
    if dtype not in kinds:
        raise Unsupported(f"weights are {dtype}")
    return kinds[dtype]


def _raw(values: mx.array) -> Array:
    mx.eval(values)
    if values.dtype in (mx.bfloat16, mx.float16):
        values = values.view(mx.uint16)
    return np.array(values, copy=False)


def _blocks(form: Format, outputs: int, inputs: int) -> Array:
    padded = -(-outputs // SIDE_BY_SIDE) * SIDE_BY_SIDE
    return aligned((padded // LANES, inputs // form.group, form.group_bytes), np.uint8)


def _put(data: Array, offset: int, values: Array, outputs: int, groups: int) -> None:
    """Put what the outputs have, group by group, at a place of each group."""
    of_group = values.reshape(outputs, groups, -1)
    count = of_group.shape[2]
    width = count * LANES * of_group.itemsize
    whole = outputs // LANES
    target = data[:, :, offset : offset + width]
    # Small pieces: the copy that numpy makes of a view of other type would be as large as all.
    for first in range(0, whole, 256):
        last = min(first + 256, whole)
        part = of_group[first * LANES : last * LANES].reshape(-1, LANES, groups, count)
        turned = np.ascontiguousarray(part.transpose(0, 2, 3, 1))
        target[first:last] = turned.view(np.uint8).reshape(last - first, groups, width)
    if rest := outputs % LANES:
        part = np.zeros((LANES, groups, count), of_group.dtype)
        part[:rest] = of_group[whole * LANES :]
        turned = np.ascontiguousarray(part.transpose(1, 2, 0))
        target[whole] = turned.view(np.uint8).reshape(groups, width)


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that begin at a whole cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    found: Array = memory[start : start + size].view(dtype).reshape(shape)
    return found
