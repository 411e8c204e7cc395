"""K-quants in the compact form that kernels of our own read: codes, small integers as scales, factors.

What these mean, and which types have such a form, is `native.compact`'s to say. Values are neither rounded
nor multiplied here, only put elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from millrace.models.gguf.blocks import Bytes, blocks_of, half, k_integers, squeeze
from millrace.models.gguf.reader import GgufTensor
from millrace.native.compact import KINDS

Parts = dict[str, npt.NDArray[Any]]

_SLAB = 1 << 25


def compact(tensor: GgufTensor) -> Parts | None:
    """The tensor's arrays by their names, rows first; None where its type has no such form."""
    if len(tensor.shape) != 2 or tensor.kind.name not in KINDS:
        return None
    read = _READERS[tensor.kind.name]
    size = GGML_QUANT_SIZES[tensor.kind][1]
    step = max(1, _SLAB // tensor.shape[1])
    slabs = [
        read(tensor.rows[first : first + step], size) for first in range(0, tensor.shape[0], step)
    ]
    return {name: np.concatenate([slab[name] for slab in slabs]) for name in slabs[0]}


def _q2(rows: Bytes, size: int) -> Parts:
    blocks = blocks_of(rows, size)
    # 64 bytes: each run of 32 has four rows of codes, two bits each, one above the other.
    runs = blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 1, 32)
    codes = runs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    return {
        "codes": _words(codes, 2),
        "scales": _signed(blocks[..., :16] & np.uint8(15)),
        "scale_factors": half(rows, size, 80),
        "minima": _signed(blocks[..., :16] >> np.uint8(4)),
        "minimum_factors": half(rows, size, 82),
    }


def _q3(rows: Bytes, size: int) -> Parts:
    blocks = blocks_of(rows, size)
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    runs = blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 1, 32)
    low = runs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    codes = low.reshape(high.shape) | high << np.uint8(2)
    # 12 bytes: the low four bits of 16 scales in eight, and the high two in four.
    packed = blocks[..., 96:108]
    fours = np.concatenate([packed[..., :8] & np.uint8(15), packed[..., :8] >> np.uint8(4)], -1)
    twos = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    scales = (fours | twos.reshape(fours.shape) << np.uint8(4)).view(np.int8) - np.int8(32)
    return {
        "codes": _words(codes, 4),
        "scales": _by_row(scales),
        "scale_factors": half(rows, size, 108),
    }


def _q6(rows: Bytes, size: int) -> Parts:
    blocks = blocks_of(rows, size)
    # Each half of a block: 64 bytes with two rows of low bits, 32 with four rows of high ones.
    nibbles = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = nibbles >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    codes = low.reshape(high.shape) | high << np.uint8(4)
    return {
        "codes": _words(codes, 6),
        "scales": _signed(blocks[..., 192:208]),
        "scale_factors": half(rows, size, 208),
    }


def _with_codes_elsewhere(rows: Bytes, size: int) -> Parts:
    """Q4_K and Q5_K, whose codes are the same in MLX's form."""
    scales, minima = k_integers(rows, size)
    return {
        "scales": _signed(scales),
        "scale_factors": half(rows, size),
        "minima": _signed(minima),
        "minimum_factors": half(rows, size, 2),
    }


_READERS: dict[str, Callable[[Bytes, int], Parts]] = {
    Type.Q2_K.name: _q2,
    Type.Q3_K.name: _q3,
    Type.Q4_K.name: _with_codes_elsewhere,
    Type.Q5_K.name: _with_codes_elsewhere,
    Type.Q6_K.name: _q6,
}


def _words(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    return squeeze(_by_row(codes), bits)


def _signed(values: Bytes) -> npt.NDArray[np.int8]:
    return _by_row(values).view(np.int8)


def _by_row(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values).reshape(values.shape[0], -1)
