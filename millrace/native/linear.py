"""Linear layers by our own kernels, for models that are not run as a whole.

Each product leaves MLX's graph and comes back to it, which costs a little every time; the weights stay
packed, which saves far more.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from millrace.native import library, stages
from millrace.native.packing import (
    Array,
    PackedMatrix,
    Packer,
    UnsupportedByKernels,
    aligned,
    check_layer,
)
from millrace.native.pool import Pool
from millrace.native.products import SUMS
from millrace.native.records import StageRecord, embedding, product, rows_of, unpacked_bytes

_HEAD = "lm_head"


class Products:
    """Products with packed matrices, one at a time, on all cores."""

    def __init__(self, threads: int) -> None:
        self._pool = Pool(threads)
        # One for all: threads that are slow to leave a run find another in its place, and leave.
        self._program = aligned((2, len(stages.HEAD) + len(stages.PRODUCT)), np.int64)
        self._buffers: dict[str, Array] = {}
        self.logits = True
        """Whether the products of a model's head are wanted."""

    def rows(self, matrix: PackedMatrix, x: Array) -> Array:
        """The rows of `x` times a matrix."""
        count = x.shape[0]
        padded = library.padded_rows(count)
        inputs = self._buffer("x", padded, matrix.inputs)
        sums = self._buffer("sums", padded, matrix.inputs // SUMS)
        out = self._buffer("out", padded, matrix.blocks * 16)
        scratch = self._buffer("scratch", self._pool.threads, unpacked_bytes([matrix]) // 4)
        copy = {
            **rows_of("x", x),
            **rows_of("out", inputs),
            "count": matrix.inputs // 16,
            **rows_of("sums", sums),
        }
        copied = library.shared().address["copied"]
        self._run(
            StageRecord.of(copied, count, copy, stages.COPIED),
            product(matrix, inputs, sums, out, padded, scratch, stages.ZERO),
        )
        return out[:count, : matrix.outputs]

    def embedded(self, matrix: PackedMatrix, tokens: Array) -> Array:
        """Rows of a matrix by their numbers."""
        if not 0 <= tokens.min() <= tokens.max() < matrix.outputs:
            raise ValueError(f"Token ids are below {matrix.outputs}.")
        out = self._buffer("out", tokens.size, matrix.inputs)
        self._run(embedding(matrix, tokens, tokens.size, out, 1.0))
        return out[: tokens.size, : matrix.inputs]

    def _run(self, *wanted: StageRecord) -> None:
        program = self._program[: len(wanted)]
        self._pool.retire(self._program)
        for row, stage in zip(program, wanted, strict=True):
            record = stage.record(waits=1)
            row[: len(record)] = record
        self._pool.run(program)

    def _buffer(self, name: str, rows: int, width: int) -> Array:
        width = -(-width // 16) * 16
        found = self._buffers.get(name)
        if found is None or found.size < rows * width:
            found = self._buffers[name] = aligned((rows * width,), np.float32)
        return found[: rows * width].reshape(rows, width)


class OwnLinear(nn.Module):  # type: ignore[misc]
    """In a linear layer's place."""

    def __init__(self, matrix: PackedMatrix, products: Products, *, head: bool) -> None:
        super().__init__()
        self._matrix, self._products, self._head = matrix, products, head

    @property
    def nbytes(self) -> int:
        return self._matrix.nbytes

    @property
    def adaptable(self) -> tuple[int, int] | None:
        """Inputs and outputs, where an adapter may change the layer."""
        return self._matrix.inputs, self._matrix.outputs

    def __call__(self, x: mx.array) -> mx.array:
        if self._head and not self._products.logits:
            return mx.zeros((*x.shape[:-1], 0))
        flat = mx.contiguous(x.reshape(-1, self._matrix.inputs).astype(mx.float32))
        mx.eval(flat)
        out = self._products.rows(self._matrix, np.array(flat, copy=False))
        return mx.array(out).reshape(*x.shape[:-1], self._matrix.outputs)


class OwnEmbedding(OwnLinear):
    """In an embedding's place; it may be the head as well."""

    def __init__(self, matrix: PackedMatrix, products: Products) -> None:
        super().__init__(matrix, products, head=True)

    @property
    def adaptable(self) -> tuple[int, int] | None:
        return None

    def __call__(self, tokens: mx.array) -> mx.array:
        ids = np.array(tokens.reshape(-1), dtype=np.int64)
        out = self._products.embedded(self._matrix, ids)
        return mx.array(out).reshape(*tokens.shape, self._matrix.inputs)

    def as_linear(self, x: mx.array) -> mx.array:
        return super().__call__(x)


def replace_layers(
    model: nn.Module, packer: Packer, threads: int, compiled: Callable[[], None] = lambda: None
) -> Products | None:
    """Put our own layers in place of a model's quantised ones; None where there are none.

    `compiled` is called when all are packed, and returns when their kernels are compiled.
    """
    packed: dict[str, PackedMatrix] = {}
    for name, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if type(layer) not in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            continue
        try:
            check_layer(layer)
        except UnsupportedByKernels:
            continue
        packed[name] = packer.pack(layer)
    if not packed:
        return None
    compiled()
    products = Products(threads)

    def swap(name: str, layer: nn.Module) -> nn.Module:
        if name not in packed:
            return layer
        if type(layer) is nn.QuantizedEmbedding:
            return OwnEmbedding(packed[name], products)
        return OwnLinear(packed[name], products, head=name.split(".")[-1] == _HEAD)

    leaves = tree_map_with_path(swap, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    return products
