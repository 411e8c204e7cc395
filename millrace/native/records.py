"""Records of the stages that whole models and single layers share: products and embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from millrace.native import library, stages
from millrace.native.packing import Array, PackedMatrix
from millrace.native.products import FLOAT_BYTES


@dataclass(frozen=True)
class StageRecord:
    """What is called, how often, and what it is told."""

    function: int
    units: int
    fields: list[int]

    @classmethod
    def of(
        cls, function: int, units: int, fields: Mapping[str, int], names: Iterable[str]
    ) -> StageRecord:
        return cls(function, units, [fields[name] for name in names])

    def record(self, waits: int) -> list[int]:
        """As it lies in memory; `waits` is how many stages must be done before the next begins."""
        return [self.function, self.units, 0, 0, waits, *self.fields]


def product(
    matrix: PackedMatrix, x: Array, sums: Array, out: Array, rows: int, scratch: Array, start: int
) -> StageRecord:
    """So many padded rows times a matrix."""
    code = library.of_format(matrix.form).address
    if rows in library.streamed_rows():
        function, blocks = code[f"streamed{rows}"], library.streamed_blocks(rows)
    else:
        function, blocks = code["tiled"], library.tile_shape()[1]
    if matrix.bias is not None:
        start = stages.BIAS if start == stages.ZERO else stages.KEEP_BIAS
    fields = {
        "weights": at(matrix.data),
        "block_bytes": matrix.block_bytes,
        "groups": matrix.groups,
        **rows_of("x", x),
        **rows_of("sums", sums),
        **rows_of("out", out),
        "rows": rows,
        "start": start,
        "bias": at(matrix.bias) if matrix.bias is not None else 0,
        "scratch": at(scratch),
        "scratch_bytes": scratch.strides[0],
    }
    return StageRecord.of(function, matrix.blocks // blocks, fields, stages.PRODUCT)


def embedding(
    matrix: PackedMatrix, tokens: Array, count: int, out: Array, factor: float
) -> StageRecord:
    """Rows of a matrix by their numbers, times a factor."""
    fields = {
        "tokens": at(tokens),
        "weights": at(matrix.data),
        "block_bytes": matrix.block_bytes,
        "groups": matrix.groups,
        **rows_of("out", out),
        "factor": bits(factor),
    }
    function = library.of_format(matrix.form).address["embedded"]
    return StageRecord.of(function, count, fields, stages.EMBED)


def unpacked_bytes(matrices: Iterable[PackedMatrix]) -> int:
    """What a thread needs for the unpacked blocks of the largest matrix."""
    largest = max(matrix.inputs for matrix in matrices)
    blocks = library.tile_shape()[1]
    return (largest + 2 * largest // 16) * blocks * 16 * FLOAT_BYTES


def at(array: Array) -> int:
    return int(array.ctypes.data)


def rows_of(name: str, array: Array) -> dict[str, int]:
    """Where an array's rows begin, and how far one is from the next."""
    return {name: at(array), f"{name}_row": int(array.strides[0])}


def bits(value: float) -> int:
    """A float as a field of a record holds it."""
    return int(np.float32(value).view(np.uint32))
