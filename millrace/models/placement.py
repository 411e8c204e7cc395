"""What a device wants of the weights: their type, and how quantised layers are driven.

This is the one place that knows why the CPU gets float32 (MLX has a fast BLAS for nothing else) and
what CUDA's quantised product needs. Metal takes the weights as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model

from millrace.config import Weights

Device = Literal["cpu", "metal", "cuda"]


def resolve_weights(wanted: Weights, device: Device) -> Literal["keep", "bf16", "f32"]:
    if wanted == "auto":
        return "f32" if device == "cpu" else "keep"
    return wanted


def place(model: Any, wanted: Weights, device: Device) -> None:
    """Give a lazily loaded model the weights that suit the device."""
    mode = resolve_weights(wanted, device)
    if mode == "keep":
        return
    dtype = mx.float32 if mode == "f32" else mx.bfloat16
    # Scales are widened before the product with them, so that dequantising rounds nothing.
    model.update(tree_map(lambda x: _cast(x, mx.float32), model.parameters()))
    dequantize_model(model)
    model.update(tree_map(lambda x: _cast(x, dtype), model.parameters()))


def _cast(value: Any, dtype: mx.Dtype) -> Any:
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return value.astype(dtype)
    return value
