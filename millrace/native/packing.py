"""From a layer's arrays to packed memory: sixteen outputs side by side, group after group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from millrace.native.compact import KINDS, SPAN, STEM
from millrace.native.emit import LANES
from millrace.native.formats import DENSE_GROUP, Format

Array = npt.NDArray[Any]
SIDE_BY_SIDE = 4 * LANES
"""Outputs are padded to a multiple of this."""


class UnsupportedByKernels(Exception):
    """Why a model is not run by these kernels."""


@dataclass(frozen=True)
class PackedMatrix:
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
        return int(self.data.shape[1]) * self.form.span

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes) + (self.bias.nbytes if self.bias is not None else 0)


def check_layer(layer: Any) -> None:
    """Raise UnsupportedByKernels unless the layer can be packed."""
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        if layer.mode != "affine":
            raise UnsupportedByKernels(f"weights are quantised as {layer.mode}")
        if layer.group_size % DENSE_GROUP:
            raise UnsupportedByKernels(f"weights are quantised in groups of {layer.group_size}")
        _codes(layer.bits)
        _scale_kind(layer["scales"].dtype)
    elif type(layer) in (nn.Linear, nn.Embedding):
        if layer["weight"].shape[1] % DENSE_GROUP:
            raise UnsupportedByKernels(f"a matrix has {layer['weight'].shape[1]} inputs")
        _scale_kind(layer["weight"].dtype)
    else:
        raise UnsupportedByKernels(f"a layer is {type(layer).__name__}")


@dataclass(frozen=True)
class Compact:
    """A matrix's arrays of the file that holds what MLX cannot, and its type in GGUF."""

    kind: str
    arrays: dict[str, mx.array]


def read_compact(folder: Path) -> dict[str, Compact]:
    """What a model's folder has in compact form, by the names of its modules; no values are read yet."""
    found: dict[str, Compact] = {}
    for path in sorted(folder.glob(f"{STEM}*.safetensors")):
        for name, array in mx.load(str(path)).items():
            # Others may have files of such a name.
            module, kind, part = ["", "", *name.rsplit(".", 2)][-3:]
            if kind in KINDS:
                found.setdefault(module, Compact(kind, {})).arrays[part] = array
    return found


class Packer:
    """Packs a model's layers, those that have a compact form from that."""

    def __init__(
        self,
        model: Any,
        compact: dict[str, Compact],
        found: Callable[[Format], None] = lambda form: None,
    ) -> None:
        """`found` gets the format of each matrix as soon as that is known."""
        self._found = found
        modules = dict(model.named_modules()) if compact else {}
        self._compact = {
            id(modules[name]): compact.pop(name) for name in modules if name in compact
        }

    def pack(self, layer: Any) -> PackedMatrix:
        packed = pack(layer, self._compact.pop(id(layer), None))
        self._found(packed.form)
        return packed


def pack(layer: Any, compact: Compact | None = None) -> PackedMatrix:
    """A linear or embedding layer's matrix; its own arrays are let go of.

    What is given in compact form takes the place of the layer's weights, which are not read then.
    """
    check_layer(layer)
    if compact is not None:
        packed = _compact(layer, compact)
    else:
        packed = _quantized(layer) if "scales" in layer else _dense(layer["weight"])
    bias = floats(layer["bias"]) if "bias" in layer else None
    for name in ("weight", "scales", "biases"):
        if name in layer:
            layer[name] = mx.zeros((0,))
    if bias is None:
        return packed
    padded = np.zeros(packed.blocks * LANES, np.float32)
    padded[: bias.size] = bias
    return PackedMatrix(packed.form, packed.data, packed.outputs, packed.inputs, padded)


def floats(values: mx.array) -> npt.NDArray[np.float32]:
    """A copy of some values as numpy's floats."""
    return np.array(values.astype(mx.float32), dtype=np.float32)


def _quantized(layer: Any) -> PackedMatrix:
    group, bits = layer.group_size, layer.bits
    weight, scales, biases = layer["weight"], layer["scales"], layer["biases"]
    outputs, inputs = scales.shape[0], scales.shape[1] * group
    centred = _is_centred(scales, biases, bits)
    form = Format(
        _codes(bits),
        group,
        _scale_kind(scales.dtype),
        biased=not centred,
        zero=2 ** (bits - 1) if centred else 0,
    )
    data = _blocks(form, outputs, inputs)
    _put(data, form, "codes", _raw(weight))
    _put(data, form, "scales", _raw(scales))
    if form.biased:
        _put(data, form, "biases", _raw(biases))
    return PackedMatrix(form, data, outputs, inputs)


def _is_centred(scales: mx.array, biases: mx.array, bits: int) -> bool:
    """Whether every bias only moves the middle of the codes to nothing."""
    middle = -(2.0 ** (bits - 1))
    wanted = scales.astype(mx.float32) * middle
    return bool(mx.all(wanted == biases.astype(mx.float32)).item())


def _compact(layer: Any, compact: Compact) -> PackedMatrix:
    kind, arrays = KINDS[compact.kind], compact.arrays
    missing = [part for part in kind.parts if part not in arrays]
    if missing:
        raise ValueError(f"packed weights of type {compact.kind} have no {missing[0]}")
    codes = arrays["codes"] if kind.own_codes else layer["weight"]
    outputs, inputs = codes.shape[0], codes.shape[1] * 32 // kind.bits
    form = Format(_codes(kind.bits), kind.group, "s8", biased=kind.minima, zero=kind.zero)
    if (outputs, inputs) != _shape(layer) or inputs % SPAN:
        raise ValueError(f"packed weights of {outputs} x {inputs} are not those of their layer")
    data = _blocks(form, outputs, inputs)
    _put(data, form, "codes", _raw(codes))
    _put(data, form, "scales", _raw(arrays["scales"]))
    _put(data, form, "scale_factors", _raw(arrays["scale_factors"]))
    if kind.minima:
        _put(data, form, "biases", _raw(arrays["minima"]))
        # What is subtracted there is added here.
        _put(data, form, "bias_factors", _raw(arrays["minimum_factors"]) ^ np.uint16(0x8000))
    return PackedMatrix(form, data, outputs, inputs)


def _shape(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a layer, from shapes alone."""
    outputs, columns = layer["weight"].shape
    if "scales" not in layer:
        return outputs, columns
    return outputs, layer["scales"].shape[1] * layer.group_size


def _codes(bits: int) -> Any:
    if bits not in (2, 3, 4, 5, 6, 8):
        raise UnsupportedByKernels(f"weights have {bits} bits")
    return f"u{bits}"


def _dense(weight: mx.array) -> PackedMatrix:
    outputs, inputs = weight.shape
    form = Format(_scale_kind(weight.dtype))  # type: ignore[arg-type]
    data = _blocks(form, outputs, inputs)
    _put(data, form, "codes", _raw(weight))
    return PackedMatrix(form, data, outputs, inputs)


def _scale_kind(dtype: mx.Dtype) -> Any:
    kinds = {mx.float16: "f16", mx.bfloat16: "bf16", mx.float32: "f32"}
    if dtype not in kinds:
        raise UnsupportedByKernels(f"weights are {dtype}")
    return kinds[dtype]


def _raw(values: mx.array) -> Array:
    mx.eval(values)
    if values.dtype in (mx.bfloat16, mx.float16):
        values = values.view(mx.uint16)
    return np.array(values, copy=False)


def _blocks(form: Format, outputs: int, inputs: int) -> Array:
    padded = -(-outputs // SIDE_BY_SIDE) * SIDE_BY_SIDE
    return aligned((padded // LANES, inputs // form.group // form.span, form.span_bytes), np.uint8)


def _put(data: Array, form: Format, part: str, values: Array) -> None:
    """Put one of the outputs' arrays where it belongs in each group, or in each span of them."""
    blocks, spans = data.shape[:2]
    if part in ("scale_factors", "bias_factors"):
        room = data[:, :, None, : form.span_head_bytes]
        offset = 0 if part == "scale_factors" else form.factor_bytes
    else:
        room = data[:, :, form.span_head_bytes :].reshape(blocks, spans, form.span, -1)
        offset = {"scales": 0, "biases": form.scale_bytes, "codes": form.head_bytes}[part]
    groups = spans * room.shape[2]
    outputs = values.shape[0]
    of_group = values.reshape(outputs, groups, -1)
    count = of_group.shape[2]
    width = count * LANES * of_group.itemsize
    whole = outputs // LANES
    target = room[..., offset : offset + width]
    # Small pieces: the copy that numpy makes of a view of other type would be as large as all.
    for first in range(0, whole, 256):
        last = min(first + 256, whole)
        part_of = of_group[first * LANES : last * LANES].reshape(-1, LANES, groups, count)
        turned = np.ascontiguousarray(part_of.transpose(0, 2, 3, 1))
        target[first:last] = turned.view(np.uint8).reshape(last - first, *target.shape[1:])
    if rest := outputs % LANES:
        last_of = np.zeros((LANES, groups, count), of_group.dtype)
        last_of[:rest] = of_group[whole * LANES :]
        turned = np.ascontiguousarray(last_of.transpose(1, 2, 0))
        target[whole] = turned.view(np.uint8).reshape(target.shape[1:])


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that begin at a whole cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    found: Array = memory[start : start + size].view(dtype).reshape(shape)
    return found
