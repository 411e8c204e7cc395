"""Kernels called one by one, as programs call them, on memory whose ends are watched; and matrices laid out
by the letter of `formats`, without the code that packs them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.native import library, stages
from millrace.native.formats import Format
from millrace.native.packing import aligned

Array = npt.NDArray[Any]
LANES = 16
CANARY = np.float32(12345.678)
_STAGE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)


class Watched:
    """Rows of floats with canaries around and between them."""

    def __init__(self, rows: int, width: int, fill: float = np.nan) -> None:
        self._all = aligned((rows + 2, width + 2 * LANES), np.float32)
        self._all[:] = CANARY
        self.rows = self._all[1 : rows + 1, LANES : LANES + width]
        self.rows[:] = fill

    @classmethod
    def of(cls, values: Array) -> Watched:
        made = cls(*values.shape)
        made.rows[:] = values
        return made

    @property
    def at(self) -> int:
        return int(self.rows.ctypes.data)

    @property
    def stride(self) -> int:
        return int(self.rows.strides[0])

    def check(self) -> None:
        around = np.ones(self._all.shape, bool)
        rows, width = self.rows.shape
        around[1 : rows + 1, LANES : LANES + width] = False
        assert (self._all[around] == CANARY).all(), "something was written beside the rows"


@dataclass
class Matrix:
    """A packed matrix and what it stands for."""

    form: Format
    data: Array
    values: npt.NDArray[np.float64]
    magnitudes: npt.NDArray[np.float64]
    """How large what is added up is: errors of rounding are relative to it."""
    groups: int

    @property
    def blocks(self) -> int:
        return len(self.data)


def random_matrix(form: Format, outputs: int, groups: int, rng: np.random.Generator) -> Matrix:
    shape = outputs, groups * form.group
    if form.bits:
        codes = rng.integers(-form.zero, 2**form.bits - form.zero, shape)
    else:
        codes = _rounded(rng.normal(size=shape), form.codes)
    if form.scales == "none":
        values = codes.astype(np.float64)
        return Matrix(form, laid_out(form, codes, None, None), values, np.abs(values), groups)
    scales = _rounded(rng.normal(size=(outputs, groups)) / 64, form.scales)
    biases = _rounded(rng.normal(size=(outputs, groups)), form.scales) if form.biased else None
    scaled = codes * scales.astype(np.float64).repeat(form.group, axis=1)
    added = 0.0 if biases is None else biases.astype(np.float64).repeat(form.group, axis=1)
    data = laid_out(form, codes, scales, biases)
    return Matrix(form, data, scaled + added, np.abs(scaled) + np.abs(added), groups)


def _rounded(values: Array, kind: str) -> npt.NDArray[np.float32]:
    """To what the kind can hold."""
    single = values.astype(np.float32)
    if kind == "f16":
        return single.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        return (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return single


def _bytes(values: Array, kind: str) -> bytes:
    if kind == "f16":
        return values.astype("<f2").tobytes()
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype("<f4").tobytes()


def laid_out(form: Format, codes: Array, scales: Array | None, biases: Array | None) -> Array:
    """Sixteen outputs make a block; a group is scales, biases, words; words are codes in a row, of which
    their zero has been taken."""
    outputs, inputs = codes.shape
    padded = -(-outputs // 64) * 64
    groups = inputs // form.group
    blocks = [
        [_group(form, first, group, codes, scales, biases) for group in range(groups)]
        for first in range(0, padded, LANES)
    ]
    flat = np.frombuffer(b"".join(b for block in blocks for b in block), np.uint8)
    data = aligned((padded // LANES, groups, len(blocks[0][0])), np.uint8)
    data[:] = flat.reshape(data.shape)
    return data


def _group(
    form: Format, first: int, group: int, codes: Array, scales: Array | None, biases: Array | None
) -> bytes:
    def lanes(values: Array) -> Array:
        found = np.zeros((LANES, values.shape[1]), values.dtype)
        some = values[first : first + LANES]
        found[: len(some)] = some
        return found

    parts = [_bytes(lanes(v)[:, group], form.scales) for v in (scales, biases) if v is not None]
    mine = lanes(codes)[:, group * form.group : (group + 1) * form.group]
    if form.codes in ("f16", "bf16", "f32"):
        return b"".join([*parts, _bytes(mine.T, form.codes)])
    bits = (mine + form.zero)[..., None] >> np.arange(form.bits) & 1
    stream = np.packbits(bits.reshape(LANES, -1).astype(np.uint8), axis=1, bitorder="little")
    return b"".join([*parts, np.ascontiguousarray(stream.view("<u4").T).tobytes()])


def call(address: int, units: int, fields: dict[str, int], names: tuple[str, ...]) -> None:
    """Run all units of a stage, the last first: their order must not matter."""
    head = [address, units, *[0] * (len(stages.HEAD) - 2)]
    record = np.array(head + [fields[name] for name in names], np.int64)
    function = _STAGE(address)
    for unit in reversed(range(units)):
        function(record.ctypes.data, unit, 1)


def multiply(
    matrix: Matrix, x: Array, *, start: int = stages.ZERO, there: Array | None = None,
    bias: Array | None = None,
) -> Array:  # fmt: skip
    """Rows times a matrix, padded as programs pad them; all of the outputs, those padded too."""
    count, inputs = x.shape
    rows, width = library.padded_rows(count), matrix.blocks * LANES
    code = library.of_format(matrix.form).address
    if rows in library.streamed_rows():
        function, blocks = code[f"streamed{rows}"], library.streamed_blocks(rows)
    else:
        function, blocks = code["tiled"], library.tile_shape()[1]
    whole = np.zeros((rows, inputs), np.float32)
    whole[:count] = x
    inputs_at = Watched.of(whole)
    sums = Watched.of(whole.reshape(rows, -1, 32).sum(-1))
    out = Watched(rows, width)
    if there is not None:
        out.rows[:] = 0
        out.rows[:count, : there.shape[1]] = there
    scratch = Watched(2, (inputs + 2 * inputs // LANES) * LANES * blocks)
    added = np.zeros(width, np.float32)
    if bias is not None:
        added[: len(bias)] = bias
    fields = {
        "weights": int(matrix.data.ctypes.data),
        "block_bytes": int(matrix.data.shape[1] * matrix.data.shape[2]),
        "groups": matrix.groups,
        "x": inputs_at.at,
        "x_row": inputs_at.stride,
        "sums": sums.at,
        "sums_row": sums.stride,
        "out": out.at,
        "out_row": out.stride,
        "rows": rows,
        "start": start,
        "bias": int(added.ctypes.data),
        "scratch": scratch.at,
        "scratch_bytes": scratch.stride,
    }
    call(function, matrix.blocks // blocks, fields, stages.PRODUCT)
    for watched in (inputs_at, sums, out, scratch):
        watched.check()
    return out.rows[:count].copy()


def embed(matrix: Matrix, tokens: Array, factor: float = 1.0) -> Array:
    chosen = np.ascontiguousarray(tokens, np.int64)
    out = Watched(len(chosen), matrix.values.shape[1])
    fields = {
        "tokens": int(chosen.ctypes.data),
        "weights": int(matrix.data.ctypes.data),
        "block_bytes": int(matrix.data.shape[1] * matrix.data.shape[2]),
        "groups": matrix.groups,
        "out": out.at,
        "out_row": out.stride,
        "factor": int(np.float32(factor).view(np.uint32)),
    }
    address = library.of_format(matrix.form).address["embedded"]
    call(address, len(chosen), fields, stages.EMBED)
    out.check()
    return out.rows.copy()
