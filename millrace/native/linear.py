"""Linear layers by our own kernels, for models that are not run as a whole.

Each product leaves MLX's graph and comes back to it, which costs a little every time; the weights stay
packed, which saves far more.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from millrace.native import library, stages
from millrace.native.packing import Array, Packed, Packer, Unsupported, aligned, check_layer
from millrace.native.pool import Pool
from millrace.native.products import SUMS
from millrace.native.program import unpacked_bytes

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

    def rows(self, matrix: Packed, x: Array) -> Array:
        """The rows of `x` times a matrix."""
        count = x.shape[0]
        padded = library.padded_rows(count)
        inputs = self._buffer("x", padded, matrix.inputs)
        sums = self._buffer("sums", padded, matrix.inputs // SUMS)
        out = self._buffer("out", padded, matrix.blocks * 16)
        scratch = self._buffer("scratch", self._pool.threads, unpacked_bytes([matrix]) // 4)
        code = library.of_format(matrix.form).address
        if padded in library.STREAMED:
            function, blocks = code[f"streamed{padded}"], library.streamed_blocks(padded)
        else:
            function, blocks = code["tiled"], library.tile_shape()[1]
        copy = {
            **_place("x", x),
            **_place("out", inputs),
            "count": matrix.inputs // 16,
            **_place("sums", sums),
        }
        product = {
            "weights": matrix.data.ctypes.data,
            "block_bytes": matrix.block_bytes,
            "groups": matrix.groups,
            **_place("x", inputs),
            **_place("sums", sums),
            **_place("out", out),
            "rows": padded,
            "start": stages.ZERO if matrix.bias is None else stages.BIAS,
            "bias": 0 if matrix.bias is None else matrix.bias.ctypes.data,
            "scratch": scratch.ctypes.data,
            "scratch_bytes": scratch.strides[0],
        }
        copied = library.shared().address["copied"]
        self._run(
            _record(copied, count, copy, stages.COPIED),
            _record(function, matrix.blocks // blocks, product, stages.PRODUCT),
        )
        return out[:count, : matrix.outputs]

    def embedded(self, matrix: Packed, tokens: Array) -> Array:
        """Rows of a matrix by their numbers."""
        if not 0 <= tokens.min() <= tokens.max() < matrix.outputs:
            raise ValueError(f"Token ids are below {matrix.outputs}.")
        out = self._buffer("out", tokens.size, matrix.inputs)
        fields = {
            "tokens": tokens.ctypes.data,
            "weights": matrix.data.ctypes.data,
            "block_bytes": matrix.block_bytes,
            "groups": matrix.groups,
            **_place("out", out),
            "factor": int(np.float32(1).view(np.uint32)),
        }
        function = library.of_format(matrix.form).address["embedded"]
        self._run(_record(function, tokens.size, fields, stages.EMBED))
        return out[: tokens.size, : matrix.inputs]

    def _run(self, *records: list[int]) -> None:
        program = self._program[: len(records)]
        self._pool.retire(self._program)
        for row, record in zip(program, records, strict=True):
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

    def __init__(self, matrix: Packed, products: Products, *, head: bool) -> None:
        super().__init__()
        self._matrix, self._products, self._head = matrix, products, head

    @property
    def nbytes(self) -> int:
        return self._matrix.nbytes

    def __call__(self, x: mx.array) -> mx.array:
        if self._head and not self._products.logits:
            return mx.zeros((*x.shape[:-1], 0))
        flat = mx.contiguous(x.reshape(-1, self._matrix.inputs).astype(mx.float32))
        mx.eval(flat)
        out = self._products.rows(self._matrix, np.array(flat, copy=False))
        return mx.array(out).reshape(*x.shape[:-1], self._matrix.outputs)


class OwnEmbedding(OwnLinear):
    """In an embedding's place; it may be the head as well."""

    def __init__(self, matrix: Packed, products: Products) -> None:
        super().__init__(matrix, products, head=True)

    def __call__(self, tokens: mx.array) -> mx.array:
        ids = np.array(tokens.reshape(-1), dtype=np.int64)
        out = self._products.embedded(self._matrix, ids)
        return mx.array(out).reshape(*tokens.shape, self._matrix.inputs)

    def as_linear(self, x: mx.array) -> mx.array:
        return super().__call__(x)


def replace_layers(model: nn.Module, packer: Packer, threads: int) -> Products | None:
    """Put our own layers in place of a model's quantised ones; None where there are none."""
    products: Products | None = None

    def swap(name: str, layer: nn.Module) -> nn.Module:
        nonlocal products
        if type(layer) not in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            return layer
        try:
            check_layer(layer)
        except Unsupported:
            return layer
        products = products or Products(threads)
        if type(layer) is nn.QuantizedEmbedding:
            return OwnEmbedding(packer.pack(layer), products)
        return OwnLinear(packer.pack(layer), products, head=name.split(".")[-1] == _HEAD)

    leaves = tree_map_with_path(swap, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    return products


def _record(function: int, units: int, fields: dict[str, int], names: tuple[str, ...]) -> list[int]:
    return [function, units, 0, 0, 1, *(fields[name] for name in names)]


def _place(name: str, array: Array) -> dict[str, Any]:
    return {name: array.ctypes.data, f"{name}_row": array.strides[0]}
