"""Activations by name. On a CPU they are numpy's: MLX has no vectors for exp and erf there.

GELU in float32 took four fifths of a pass through MiniLM. Here erf is a quotient of two polynomials,
fitted to it within 2e-8, and texts' states are taken in pieces that stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

Activation = Callable[[mx.array], mx.array]
_Floats = NDArray[np.float32]
_PIECE = 1 << 15
"""Numbers that are worked on at once."""
_ABOVE = (
    1.97484327e-06,
    2.88035520e-04,
    4.00345673e-03,
    5.34669067e-02,
    1.96244783e-01,
    1.12837898,
)
_BELOW = (3.74806849e-05, 1.21631058e-03, 1.54440512e-02, 1.16474675e-01, 5.07248572e-01, 1.0)
_SATURATED = 4.0
"""Beyond this erf is 1, as far as float32 can tell."""

_ON_DEVICE: dict[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": mx.tanh,
}
_ALSO = {"gelu_pytorch_tanh": "gelu_new", "swiglu": "silu", "swish": "silu"}


def activation(name: str) -> Activation:
    name = _ALSO.get(name, name)
    if name not in _ON_DEVICE:
        raise ValueError(f"there is no activation '{name}'")
    on_device, on_host = _ON_DEVICE[name], _ON_HOST.get(name)
    if on_host is None:
        return on_device

    def applied(x: mx.array) -> mx.array:
        return _in_pieces(x, on_host) if is_hosted(x) else on_device(x)

    return applied


def is_hosted(x: mx.array) -> bool:
    """Whether numpy is the faster one for it."""
    on_cpu: bool = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and x.dtype == mx.float32


def softmax(scores: mx.array) -> mx.array:
    """Over the last axis; on the host. Every row has a score that is not minus infinity."""
    found = np.array(scores, copy=False)
    rows = np.ascontiguousarray(found).reshape(-1, found.shape[-1])
    out = np.empty_like(rows)
    piece = max(1, _PIECE // rows.shape[1])
    for start in range(0, len(rows), piece):
        x = rows[start : start + piece]
        z = out[start : start + piece]
        np.subtract(x, x.max(axis=1, keepdims=True), out=z)
        np.exp(z, out=z)
        z /= z.sum(axis=1, keepdims=True)
    return mx.array(out.reshape(found.shape))


def _in_pieces(x: mx.array, work: Callable[[_Floats, _Floats], None]) -> mx.array:
    found = np.array(x, copy=False)
    flat = np.ascontiguousarray(found).reshape(-1)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _PIECE):
        work(flat[start : start + _PIECE], out[start : start + _PIECE])
    return mx.array(out.reshape(found.shape))


def _gelu(x: _Floats, out: _Floats) -> None:
    z = np.clip(x * np.float32(0.5**0.5), -_SATURATED, _SATURATED)
    square = z * z
    z *= _polynomial(square, _ABOVE)
    z /= _polynomial(square, _BELOW)
    z += 1.0
    z *= x
    np.multiply(z, np.float32(0.5), out=out)


def _polynomial(x: _Floats, factors: tuple[float, ...]) -> _Floats:
    found = x * np.float32(factors[0])
    for factor in factors[1:-1]:
        found += np.float32(factor)
        found *= x
    found += np.float32(factors[-1])
    return found


def _gelu_new(x: _Floats, out: _Floats) -> None:
    z = x * x
    z *= np.float32(0.044715)
    z += 1.0
    z *= x
    z *= np.float32((2.0 / np.pi) ** 0.5)
    np.tanh(z, out=z)
    z += 1.0
    z *= x
    np.multiply(z, np.float32(0.5), out=out)


def _silu(x: _Floats, out: _Floats) -> None:
    # Of what is far below zero nothing is left, and its exponential would be beyond all numbers.
    z = np.exp(-np.maximum(x, np.float32(-80.0)))
    z += 1.0
    np.divide(x, z, out=out)


_ON_HOST: dict[str, Callable[[_Floats, _Floats], None]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "silu": _silu,
}
