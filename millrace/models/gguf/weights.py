"""Carries a GGUF model's tensors into safetensors: renamed, rows put back, packed or widened.

Quantised types with an exact MLX form stay quantised. Float types keep their values. All other
types are dequantised by the `gguf` package and stored as float16, rounding values float16 cannot
hold, or as float32 when `exact` is asked for. K-quants are written a second time, into a file of
their own, as the kernels of our own read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Kind

from millrace.errors import ModelError
from millrace.models.gguf.architectures import ConversionPlan
from millrace.models.gguf.blocks import GROUP, pack
from millrace.models.gguf.kquants import compact
from millrace.models.gguf.reader import GGUF, GgufTensor
from millrace.models.gguf.writer import Array, DType, SafetensorsWriter, as_array
from millrace.native.compact import STEM

_FLOATS = (Kind.F32, Kind.F16, Kind.BF16, Kind.F64)
_SLAB = 1 << 24


def write_weights(
    model: GGUF,
    plan: ConversionPlan,
    folder: Path,
    *,
    exact: bool,
    done: Callable[[int, int], None],
) -> dict[str, Any] | None:
    """Write all tensors; returns config.json's `quantization`, or None if nothing is quantised."""
    total = sum(model.tensors[name].raw.nbytes for name in plan.targets)
    half = half_type(model)
    writer = SafetensorsWriter(folder, names=3 * len(plan.targets) + len(plan.zeros))
    compact_writer = SafetensorsWriter(folder, names=5 * len(plan.targets), stem=STEM)
    bits: dict[str, int] = {}
    sofar = 0
    for name, target in plan.targets.items():
        tensor = model.tensors[name]
        order = _row_order(tensor, plan.heads(name))
        module = target.removesuffix(".weight")
        packed = pack(tensor) if target.endswith(".weight") else None
        if packed is not None:
            bits[module] = packed.bits
            _check_finite(model, name, packed.scales, packed.biases)
            writer.add(target, as_array(packed.weight[order]))
            writer.add(f"{module}.scales", as_array(packed.scales[order]))
            writer.add(f"{module}.biases", as_array(packed.biases[order]))
        else:
            plain = _plain(tensor, order, half, exact, plan.is_shifted_norm(name))
            _check_finite(model, name, plain.data)
            writer.add(target, plain)
        if target.endswith(".weight"):
            for part, values in (compact(tensor) or {}).items():
                compact_writer.add(f"{module}.{tensor.kind.name}.{part}", as_array(values[order]))
        sofar += tensor.raw.nbytes
        done(sofar, total)
    for target, length in plan.zeros.items():
        writer.add(target, _narrow(np.zeros(length, np.float32), half))
    writer.close()
    compact_writer.close()
    return _quantization(bits)


def _check_finite(model: GGUF, name: str, *arrays: npt.NDArray[Any]) -> None:
    """Refuse NaN and infinity, with which the model would answer with noise and no error."""
    for array in arrays:
        values = array.reshape(-1)
        for start in range(0, values.size, _SLAB):
            part = values[start : start + _SLAB]
            # bfloat16 is held as its bit patterns: its exponent is all ones in both.
            bad = (part & 0x7F80) == 0x7F80 if part.dtype == np.uint16 else ~np.isfinite(part)
            if bad.any():
                raise ModelError(
                    f"{model.path} is corrupt: the tensor '{name}' has values that are NaN or "
                    f"infinite. Download it again, or take another conversion of the model."
                )


def half_type(model: GGUF) -> DType:
    """The 16-bit type the model's own tensors speak for."""
    return "BF16" if any(t.kind == Kind.BF16 for t in model.tensors.values()) else "F16"


def _quantization(bits: dict[str, int]) -> dict[str, Any] | None:
    if not bits:
        return None
    usual = Counter(bits.values()).most_common(1)[0][0]
    setting: dict[str, Any] = {"group_size": GROUP, "bits": usual, "mode": "affine"}
    for module, own in bits.items():
        if own != usual:
            setting[module] = {"group_size": GROUP, "bits": own, "mode": "affine"}
    return setting


def _row_order(tensor: GgufTensor, heads: int | None) -> Any:
    """The index that puts interleaved rotary rows (pair by pair) back to half by half."""
    if heads is None:
        return slice(None)
    rows = np.arange(tensor.shape[0])
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _plain(tensor: GgufTensor, order: Any, half: DType, exact: bool, minus_one: bool) -> Array:
    if tensor.kind == Kind.F16:
        return Array("F16", tensor.raw.view(np.float16).reshape(tensor.shape)[order])
    if tensor.kind == Kind.BF16:
        return Array("BF16", tensor.raw.view(np.uint16).reshape(tensor.shape)[order])
    if tensor.kind in _FLOATS:
        values = tensor.floats()[order]
        return _narrow(values - np.float32(1) if minus_one else values, half)
    if exact:
        return as_array(tensor.floats()[order])
    rounded = _rounded(tensor)
    return as_array((tensor.floats() if rounded is None else rounded)[order])


def _narrow(values: npt.NDArray[np.float32], half: DType) -> Array:
    """The values in the 16-bit type where that keeps every one of them, else in float32."""
    if half == "BF16":
        patterns = values.view(np.uint32)
        if not np.any(patterns & 0xFFFF):
            return Array("BF16", (patterns >> 16).astype(np.uint16))
        return as_array(values)
    with np.errstate(over="ignore"):
        short = values.astype(np.float16)
    return as_array(short if np.array_equal(short.astype(np.float32), values) else values)


def _rounded(tensor: GgufTensor) -> npt.NDArray[np.float16] | None:
    """The dequantised values in float16, slab by slab; None if one is out of its range."""
    out = np.empty(tensor.shape, np.float16)
    step = max(1, _SLAB // tensor.shape[-1])
    if len(tensor.shape) == 1:
        step = tensor.shape[0]
    per_row = tensor.raw.nbytes // tensor.shape[0]
    for start in range(0, tensor.shape[0], step):
        raw = tensor.raw[start * per_row : (start + step) * per_row]
        rows = min(step, tensor.shape[0] - start)
        slab = GgufTensor(tensor.name, (rows, *tensor.shape[1:]), tensor.kind, raw).floats()
        with np.errstate(over="ignore"):
            out[start : start + rows] = slab
        if not np.isfinite(out[start : start + rows]).all():
            return None
    return out
