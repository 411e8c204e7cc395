"""What a device wants of the weights: their type, and how quantised layers are driven.

This is the one place that knows that a CPU gets kernels of our own with the weights as they are, or
float32 where those do not know the model (MLX has a fast BLAS for nothing else), and what CUDA's quantised
product needs. Metal takes the weights as they are.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model, get_total_parameters

from millrace.config import Weights
from millrace.models import blas
from millrace.models.footprint import WIDENED_ON_CUDA
from millrace.models.joint_products import join_products
from millrace.models.quantized import flatten
from millrace.native import LoadingNote, native, native_layers, unheard

Device = Literal["cpu", "metal", "cuda"]


def resolve_weights(wanted: Weights, device: Device) -> Literal["keep", "bf16", "f32"]:
    if wanted == "auto":
        return "f32" if device == "cpu" else "keep"
    return wanted


def place(
    model: Any,
    wanted: Weights,
    device: Device,
    folder: Path | None = None,
    note: LoadingNote = unheard,
    *,
    own: bool = True,
    whole: bool = True,
) -> Any:
    """A lazily loaded model with the weights that suit the device; perhaps another that stands for it.

    The folder it was loaded from may hold weights that only our own kernels read. Without `own`, MLX
    runs it on every device. One that is not `whole` is a rank's part: kernels of our own do its products,
    and the folder's weights are not its own.
    """
    if own and device == "cpu" and wanted == "auto":
        ours = native(model, blas.threads(), folder, note) if whole else None
        if ours is not None:
            return ours
        # What is left of the model is widened below.
        model.own_products = native_layers(model, blas.threads(), folder if whole else None, note)
    mode = resolve_weights(wanted, device)
    if wanted == "auto" and device == "cuda" and _small(model):
        mode = "bf16"
    if mode != "keep":
        _widen_all(model, mx.float32 if mode == "f32" else mx.bfloat16, device)
    if device == "cuda":
        flatten(model)
        if whole:
            join_products(model)
    return model


def _widen_all(model: Any, dtype: mx.Dtype, device: Device) -> None:
    # A stream is a thread on the CPU: layers are widened side by side.
    streams = [mx.new_stream(mx.default_device()) for _ in range(2)] if device == "cpu" else []
    for turn, layer in enumerate(getattr(model, "layers", None) or []):
        with mx.stream(streams[turn % 2]) if streams else contextlib.nullcontext():
            _widen(layer, dtype)
    _widen(model, dtype)


def _small(model: Any) -> bool:
    """Quantised, and of so few weights that bfloat16 costs less than the kernels of the quantised product,
    which MLX compiles for minutes when they are first used."""
    packed = any("scales" in module for module in model.modules())
    return packed and int(get_total_parameters(model)) * 2 <= WIDENED_ON_CUDA


def _widen(module: Any, dtype: mx.Dtype) -> None:
    # Scales are widened before the product with them, so that dequantising rounds nothing.
    module.update(tree_map(lambda x: _cast(x, mx.float32), module.parameters()))
    dequantize_model(module)
    module.update(tree_map(lambda x: _cast(x, dtype), module.parameters()))


def _cast(value: Any, dtype: mx.Dtype) -> Any:
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return value.astype(dtype)
    return value
