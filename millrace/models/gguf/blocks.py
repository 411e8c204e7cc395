"""Turns ggml's quantised blocks into MLX's affine packing, where the two agree to the last bit.

MLX reads a weight as `q * scale + bias` over groups of 32. Q4_0, Q5_0 and Q8_0 are
`d * (q - zero)` with a float16 `d`, so the bias is `-zero * d`; Q4_1 and Q5_1 carry a float16
minimum. In Q4_K and Q5_K a group's scale is a float16 times a 6-bit integer, 17 bits, which
float32 holds. In all of them `q * scale` has at most 22 bits, so float32 rounds once, in the
final sum, as ggml's own arithmetic does. Other types have no such form and return None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Kind

from millrace.models.gguf.reader import GgufTensor

GROUP = 32

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A matrix in MLX's affine form, rows first."""

    bits: int
    weight: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats


def pack(tensor: GgufTensor) -> Packed | None:
    """The tensor in MLX's form, or None where no exact one exists."""
    if len(tensor.shape) != 2:
        return None
    rows = tensor.rows
    match tensor.kind:
        case Kind.Q4_0:
            scale, quants = half(rows, 18), _nibbles(rows, 18, 2)
            return _packed(4, quants, scale, _times(scale, -8))
        case Kind.Q4_1:
            return _packed(4, _nibbles(rows, 20, 4), half(rows, 20), half(rows, 20, 2))
        case Kind.Q5_0:
            scale, quants = half(rows, 22), _nibbles(rows, 22, 6) | _fifth_bits(rows, 22, 2)
            return _packed(5, quants, scale, _times(scale, -16))
        case Kind.Q5_1:
            quants = _nibbles(rows, 24, 8) | _fifth_bits(rows, 24, 4)
            return _packed(5, quants, half(rows, 24), half(rows, 24, 2))
        case Kind.Q8_0:
            scale = half(rows, 34)
            quants = blocks_of(rows, 34)[..., 2:] ^ np.uint8(0x80)
            return _packed(8, quants, scale, _times(scale, -128))
        case Kind.Q4_K:
            return _packed(4, _k_nibbles(rows, 144, 16), *_k_scales(rows, 144))
        case Kind.Q5_K:
            high = blocks_of(rows, 176)[..., 16:48]
            fifth = np.stack([(high >> bit) & 1 for bit in range(8)], axis=-2) << np.uint8(4)
            return _packed(5, _k_nibbles(rows, 176, 48) | fifth, *_k_scales(rows, 176))
    return None


def _packed(bits: int, quants: Bytes, scales: Floats, biases: Floats) -> Packed:
    rows = quants.shape[0]
    groups = (rows, -1)
    if scales.dtype != biases.dtype:
        scales, biases = scales.astype(np.float32), biases.astype(np.float32)
    return Packed(
        bits,
        squeeze(quants.reshape(rows, -1), bits),
        scales.reshape(groups),
        biases.reshape(groups),
    )


def squeeze(quants: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Values of `bits` bits each, lowest first, as one stream of little-endian words per row."""
    rows, columns = quants.shape
    if bits == 8:
        stream = np.ascontiguousarray(quants)
    elif bits == 4:
        stream = quants[:, 0::2] | (quants[:, 1::2] << np.uint8(4))
    else:
        eights = quants.reshape(rows, columns // 8, 8)
        word = np.zeros(eights.shape[:2], np.uint64)
        for i in range(8):
            word |= eights[..., i].astype(np.uint64) << np.uint64(bits * i)
        stream = word.astype("<u8").view(np.uint8).reshape(rows, columns // 8, 8)[..., :bits]
    return np.ascontiguousarray(stream).reshape(rows, -1).view("<u4")


def blocks_of(rows: Bytes, size: int) -> Bytes:
    return rows.reshape(rows.shape[0], -1, size)


def half(rows: Bytes, size: int, at: int = 0) -> Floats:
    """The float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks_of(rows, size)[..., at : at + 2]).view("<f2")[..., 0]


def _times(scale: Floats, factor: int) -> Floats:
    """`scale * factor`, in float16 where that is exact."""
    wide: Floats = scale.astype(np.float32) * np.float32(factor)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16)
    return narrow if np.array_equal(narrow.astype(np.float32), wide) else wide


def _nibbles(rows: Bytes, size: int, at: int) -> Bytes:
    """16 bytes hold 32 values: the low halves first, then the high halves."""
    both = blocks_of(rows, size)[..., at : at + 16]
    return np.concatenate([both & np.uint8(0x0F), both >> np.uint8(4)], axis=-1)


def _fifth_bits(rows: Bytes, size: int, at: int) -> Bytes:
    bits = np.unpackbits(blocks_of(rows, size)[..., at : at + 4], axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _k_nibbles(rows: Bytes, size: int, at: int) -> Bytes:
    """128 bytes hold 8 groups: each run of 32 bytes has one group low and the next one high."""
    runs = blocks_of(rows, size)[..., at : at + 128]
    runs = runs.reshape(*runs.shape[:-1], 4, 32)
    pairs = np.stack([runs & np.uint8(0x0F), runs >> np.uint8(4)], axis=-2)
    return pairs.reshape(*runs.shape[:-2], 8, 32)


def _k_scales(rows: Bytes, size: int) -> tuple[Floats, Floats]:
    """Scales and biases of the 8 groups in a K block."""
    scales, minima = k_integers(rows, size)
    d = half(rows, size).astype(np.float32)[..., None]
    least = half(rows, size, 2).astype(np.float32)[..., None]
    return d * scales, -(least * minima)


def k_integers(rows: Bytes, size: int) -> tuple[Bytes, Bytes]:
    """What a K block's scales and minima are multiples by, from 12 bytes of 6-bit integers.

    Groups 0-3 have theirs in the low six bits of bytes 0-3 (scales) and 4-7 (minima); groups 4-7
    have four low bits in bytes 8-11 and two high bits on top of the first eight bytes.
    """
    packed = blocks_of(rows, size)[..., 4:16]
    scale, minimum, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([scale & 63, (low & 15) | (scale >> 6 << 4)], axis=-1)
    minima = np.concatenate([minimum & 63, (low >> 4) | (minimum >> 6 << 4)], axis=-1)
    return scales, minima
