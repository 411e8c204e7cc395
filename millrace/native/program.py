"""A forward pass written down: the records of its stages, for so many tokens of so many rows.

Programs are made once for a number of tokens and of logits, and used again: what differs from pass to pass
lies in tables that the records point to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.native import attention, library, stages
from millrace.native.packing import Array, Packed, aligned
from millrace.native.plan import LayerPlan, Plan
from millrace.native.products import FLOAT_BYTES, SUMS

_FIELDS = 24
UNITS = stages.HEAD.index("units")


@dataclass
class Program:
    records: npt.NDArray[np.int64]
    attending: list[int]
    """The stages whose units are items of attention."""
    merging: list[int]


class Tables:
    """What differs from pass to pass: tokens, places, whose state lies where, items of attention."""

    def __init__(self, layers: int, tokens: int, rows: int, items: int) -> None:
        self.tokens = aligned((tokens,), np.int64)
        self.places = aligned((tokens,), np.int64)
        self.rows = aligned((tokens,), np.int64)
        self.every = np.arange(tokens, dtype=np.int64)
        self.keys = aligned((layers, rows), np.int64)
        self.values = aligned((layers, rows), np.int64)
        self.strides = aligned((rows,), np.int64)
        self.items = aligned((items, len(attention.ITEM)), np.int64)
        self.merges = aligned((items, len(attention.ITEM)), np.int64)


class Buffers:
    """The floats of a pass: each row of a buffer is one token's."""

    def __init__(self, plan: Plan, tokens: int, logits: int, parts: int, threads: int) -> None:
        size = plan.head_size
        attended = plan.queries * size
        widest = max(plan.hidden, plan.intermediate, attended)
        self.tokens, self.logits_rows, self.parts_count = tokens, logits, parts
        self.x = _floats(tokens, plan.hidden)
        self.normed = _floats(tokens, plan.hidden)
        self.heads = _floats(tokens, attended + 2 * plan.heads * size)
        self.attended = _floats(tokens, attended)
        self.fed = _floats(tokens, 2 * plan.intermediate)
        self.active = _floats(tokens, plan.intermediate)
        self.sums = _floats(tokens, widest // SUMS)
        self.logits = _floats(logits, plan.head.blocks * 16)
        self.parts = _floats(parts * attention.MOST_SPLIT, size)
        self.part_stats = _floats(parts * attention.MOST_SPLIT, 2)
        layer = plan.layers[0]
        own = max(
            attention.scratch_bytes(size),
            unpacked_bytes((layer.out, layer.down, layer.gate, plan.head)),
        )
        self.scratch = aligned((threads, -(-own // 4096) * 4096), np.uint8)


class Writer:
    """Writes the records of one pass."""

    def __init__(
        self,
        plan: Plan,
        buffers: Buffers,
        tables: Tables,
        angles: list[tuple[Array, Array]],
    ) -> None:
        self._plan, self._buffers, self._tables, self._angles = plan, buffers, tables, angles
        self._records: list[list[int]] = []
        self._together = 0
        """Stages that nobody has waited for."""
        self._attending: list[int] = []
        self._merging: list[int] = []

    def write(self, tokens: int, logits: int, *, few: bool) -> Program:
        plan, buffers = self._plan, self._buffers
        padded = library.padded_rows(tokens)
        self._embed(plan.embedding, tokens)
        for number, layer in enumerate(plan.layers):
            self._norm(layer.norm, tokens)
            column = 0
            for matrix in (layer.queries, layer.keys, layer.values):
                out = buffers.heads[:, column:]
                self._product(matrix, buffers.normed, out, padded, last=matrix is layer.values)
                column += matrix.outputs
            self._heads(number, layer, tokens)
            self._attend(number, layer, few)
            self._branch(layer.out, buffers.attended, layer.out_norm, tokens)
            self._norm(layer.feed_norm, tokens)
            half = plan.intermediate
            self._product(layer.gate, buffers.normed, buffers.fed, padded, last=False)
            self._product(layer.up, buffers.normed, buffers.fed[:, half:], padded)
            self._gate(tokens)
            self._branch(layer.down, buffers.active, layer.down_norm, tokens)
        if logits:
            self._norm(plan.norm, logits)
            self._product(plan.head, buffers.normed, buffers.logits, library.padded_rows(logits))
        records = np.zeros((len(self._records), _FIELDS), np.int64)
        for record, fields in zip(records, self._records, strict=True):
            record[: len(fields)] = fields
        return Program(records, self._attending, self._merging)

    def _stage(self, function: int, units: int, fields: dict[str, int], names: tuple[str, ...],
               *, last: bool = True) -> None:  # fmt: skip
        self._together += 1
        waits, self._together = (self._together, 0) if last else (0, self._together)
        head = [function, units, 0, 0, waits]
        self._records.append(head + [fields[name] for name in names])

    def _embed(self, matrix: Packed, tokens: int) -> None:
        fields = {
            "tokens": _at(self._tables.tokens),
            "weights": _at(matrix.data),
            "block_bytes": matrix.block_bytes,
            "groups": matrix.groups,
            **_out("out", self._buffers.x),
            "factor": _bits(self._plan.embedding_factor),
        }
        function = library.of_format(matrix.form).address["embedded"]
        self._stage(function, tokens, fields, stages.EMBED)

    def _branch(self, matrix: Packed, x: Array, weight: Array | None, tokens: int) -> None:
        """Add to the rows what a branch of the layer ends with, normed first where there is a norm."""
        buffers = self._buffers
        padded = library.padded_rows(tokens)
        if weight is None:
            self._product(matrix, x, buffers.x, padded, start=stages.KEEP)
            return
        self._product(matrix, x, buffers.normed, padded)
        fields = {
            **_out("x", buffers.normed),
            "weight": _at(weight),
            **_out("out", buffers.x),
            "count": self._plan.hidden // 16,
            "eps": _bits(self._plan.eps),
        }
        self._stage(library.shared().address["added"], tokens, fields, stages.ADDED)

    def _norm(self, weight: Array, count: int) -> None:
        buffers = self._buffers
        fields = {
            **_out("x", buffers.x),
            "chosen": _at(self._tables.every),
            "weight": _at(weight),
            **_out("out", buffers.normed),
            "count": self._plan.hidden // 16,
            "eps": _bits(self._plan.eps),
            **_out("sums", buffers.sums),
        }
        self._stage(library.shared().address["norm"], count, fields, stages.NORM)

    def _product(self, matrix: Packed, x: Array, out: Array, rows: int, *,
                 start: int = stages.ZERO, last: bool = True) -> None:  # fmt: skip
        code = library.of_format(matrix.form).address
        if rows in library.STREAMED:
            function, blocks = code[f"streamed{rows}"], library.streamed_blocks(rows)
        else:
            function, blocks = code["tiled"], library.tile_shape()[1]
        if matrix.bias is not None:
            start = stages.BIAS if start == stages.ZERO else stages.KEEP_BIAS
        scratch = self._buffers.scratch
        fields = {
            "weights": _at(matrix.data),
            "block_bytes": matrix.block_bytes,
            "groups": matrix.groups,
            **_out("x", x),
            **_out("sums", self._buffers.sums),
            **_out("out", out),
            "rows": rows,
            "start": start,
            "bias": _at(matrix.bias) if matrix.bias is not None else 0,
            "scratch": _at(scratch),
            "scratch_bytes": scratch.shape[1],
        }
        self._stage(function, matrix.blocks // blocks, fields, stages.PRODUCT, last=last)

    def _heads(self, number: int, layer: LayerPlan, tokens: int) -> None:
        plan, tables = self._plan, self._tables
        cosines, sines = self._angles[layer.angles]
        fields = {
            **_out("x", self._buffers.heads),
            "queries": plan.queries,
            "heads": plan.heads,
            "size": plan.head_size // 16,
            "half": plan.head_size // 32,
            "query_norm": _at(layer.query_norm) if layer.query_norm is not None else 0,
            "key_norm": _at(layer.key_norm) if layer.key_norm is not None else 0,
            "eps": _bits(plan.eps),
            "factor": _bits(plan.scale),
            "cosines": _at(cosines),
            "sines": _at(sines),
            "angle_row": cosines.strides[0],
            "places": _at(tables.places),
            "rows": _at(tables.rows),
            "keys": _at(tables.keys[number]),
            "values": _at(tables.values[number]),
            "strides": _at(tables.strides),
        }
        self._stage(library.shared().address["headed"], tokens, fields, stages.HEADS)

    def _attend(self, number: int, layer: LayerPlan, few: bool) -> None:
        plan, tables, buffers = self._plan, self._tables, self._buffers
        fields = {
            "items": _at(tables.items),
            **_out("x", buffers.heads),
            "keys": _at(tables.keys[number]),
            "values": _at(tables.values[number]),
            "strides": _at(tables.strides),
            "size": plan.head_size // 16,
            "group": plan.queries // plan.heads,
            "window": layer.window,
            **_out("out", buffers.attended),
            **_out("sums", buffers.sums),
            "scratch": _at(buffers.scratch),
            "scratch_bytes": buffers.scratch.shape[1],
            "parts": _at(buffers.parts),
            "part_stats": _at(buffers.part_stats),
        }
        code = library.shared().address
        self._attending.append(len(self._records))
        self._stage(code["attended4" if few else "attended"], 0, fields, attention.ATTEND)
        self._merging.append(len(self._records))
        self._stage(code["merged"], 0, fields | {"items": _at(tables.merges)}, attention.MERGE)

    def _gate(self, tokens: int) -> None:
        buffers = self._buffers
        half = self._plan.intermediate
        fields = {
            "gate": _at(buffers.fed),
            "up": _at(buffers.fed) + half * FLOAT_BYTES,
            "row": buffers.fed.strides[0],
            **_out("out", buffers.active),
            "count": half // 16,
            **_out("sums", buffers.sums),
        }
        self._stage(library.shared().address[self._plan.activation], tokens, fields, stages.GATE)


def _floats(rows: int, width: int) -> Array:
    return aligned((rows, -(-width // 16) * 16), np.float32)


def _at(array: Array) -> int:
    return int(array.ctypes.data)


def _out(name: str, array: Array) -> dict[str, int]:
    return {name: _at(array), f"{name}_row": int(array.strides[0])}


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def unpacked_bytes(matrices: Iterable[Packed]) -> int:
    """What a thread needs for the unpacked blocks of the largest matrix."""
    largest = max(matrix.inputs for matrix in matrices)
    blocks = library.tile_shape()[1]
    return (largest + 2 * largest // 16) * blocks * 16 * FLOAT_BYTES
