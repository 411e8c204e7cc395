"""A forward pass written down: the records of its stages, for so many tokens of so many rows.

Programs are made once for a number of tokens and of logits, and used again: what differs from pass to pass
lies in tables that the records point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.native import attention, library, lowrank, stages
from millrace.native.adapters import HEAD, NativeAdapters
from millrace.native.packing import Array, PackedMatrix, aligned
from millrace.native.plan import LayerPlan, Plan
from millrace.native.products import FLOAT_BYTES, SUMS
from millrace.native.records import (
    StageRecord,
    at,
    bits,
    embedding,
    product,
    rows_of,
    unpacked_bytes,
)

_FIELDS = 24
_SIDE_BY_SIDE = 3
"""Products of the same inputs, at most: queries, keys and values."""
_PART = 4
"""Of the outputs that an adapter adds to a token, so many times 64 are a unit's where tokens are few."""
UNITS = stages.HEAD.index("units")


@dataclass
class Program:
    records: npt.NDArray[np.int64]
    attending: list[int]
    """The stages whose units are items of attention."""
    merging: list[int]
    adapting: list[tuple[int, int]]
    """The stages whose units are of tokens with an adapter, and how many of each."""
    held: list[Array]
    """What its records point to and nobody else holds."""


class PassTables:
    """What differs from pass to pass: tokens, positions, places, whose state lies where, items of
    attention."""

    def __init__(self, layers: int, tokens: int, rows: int, items: int) -> None:
        self.tokens = aligned((tokens,), np.int64)
        self.positions = aligned((tokens,), np.int64)
        """How far a token's queries and keys are turned; `places` is where its keys lie."""
        self.places = aligned((tokens,), np.int64)
        self.rows = aligned((tokens,), np.int64)
        self.every = np.arange(tokens, dtype=np.int64)
        self.slots = aligned((tokens,), np.int64)
        self.adapted = aligned((tokens,), np.int64)
        """The tokens that have an adapter."""
        self.keys = aligned((layers, rows), np.int64)
        self.values = aligned((layers, rows), np.int64)
        self.strides = aligned((layers, rows), np.int64)
        self.items = aligned((items, len(attention.ITEM)), np.int64)
        self.merges = aligned((items, len(attention.ITEM)), np.int64)


class Buffers:
    """The floats of a pass: each row of a buffer is one token's."""

    def __init__(
        self, plan: Plan, tokens: int, logits: int, parts: int, threads: int, ranks: int = 0
    ) -> None:
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
        self.ranks = ranks
        self.low = _floats(tokens, _SIDE_BY_SIDE * ranks)
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
        tables: PassTables,
        angles: list[tuple[Array, Array]],
        adapters: NativeAdapters | None = None,
        heads: Sequence[Array] = (),
    ) -> None:
        """With `adapters`, the stages of those are written too. With `heads`, each layer has queries,
        keys and values of its own, which the pass leaves there."""
        self._plan, self._buffers, self._tables, self._angles = plan, buffers, tables, angles
        self._adapters = adapters
        self._heads_of = heads or [buffers.heads] * len(plan.layers)
        self._adapting: list[tuple[int, int]] = []
        self._held: list[Array] = []
        self._records: list[list[int]] = []
        self._together = 0
        """Stages that nobody has waited for."""
        self._attending: list[int] = []
        self._merging: list[int] = []

    def write(self, tokens: int, logits: int, *, few: bool) -> Program:
        plan, buffers = self._plan, self._buffers
        self._embed(plan.embedding, tokens)
        for number, layer in enumerate(plan.layers):
            self._norm(layer.norm, tokens)
            ends = np.cumsum([0, layer.queries.outputs, layer.keys.outputs])
            self._products(
                number,
                buffers.normed,
                tokens,
                [
                    (name, getattr(layer, name), self._heads_of[number][:, end:])
                    for name, end in zip(("queries", "keys", "values"), ends, strict=True)
                ],
            )
            self._heads(number, layer, tokens)
            self._attend(number, layer, few)
            self._branch(number, "out", buffers.attended, layer.out_norm, tokens)
            self._norm(layer.feed_norm, tokens)
            up = buffers.fed[:, plan.intermediate :]
            both = [("gate", layer.gate, buffers.fed), ("up", layer.up, up)]
            self._products(number, buffers.normed, tokens, both)
            self._gate(tokens)
            self._branch(number, "down", buffers.active, layer.down_norm, tokens)
        if logits:
            self._norm(plan.norm, logits)
            head = [("head", plan.head, buffers.logits)]
            self._products(HEAD, buffers.normed, logits, head)
        records = np.zeros((len(self._records), _FIELDS), np.int64)
        for record, fields in zip(records, self._records, strict=True):
            record[: len(fields)] = fields
        return Program(records, self._attending, self._merging, self._adapting, self._held)

    def _stage(
        self, function: int, units: int, fields: dict[str, int], names: tuple[str, ...]
    ) -> None:
        self._add(StageRecord.of(function, units, fields, names))

    def _add(self, stage: StageRecord, *, last: bool = True) -> None:
        """Without `last`, the next stage need not wait for this one."""
        self._together += 1
        waits, self._together = (self._together, 0) if last else (0, self._together)
        self._records.append(stage.record(waits))

    def _embed(self, matrix: PackedMatrix, tokens: int) -> None:
        factor = self._plan.embedding_factor
        self._add(embedding(matrix, self._tables.tokens, tokens, self._buffers.x, factor))

    def _branch(self, number: int, name: str, x: Array, weight: Array | None, tokens: int) -> None:
        """Add to the rows what a branch of the layer ends with, normed first where there is a norm."""
        buffers, matrix = self._buffers, getattr(self._plan.layers[number], name)
        if weight is None:
            self._products(number, x, tokens, [(name, matrix, buffers.x)], start=stages.KEEP)
            return
        self._products(number, x, tokens, [(name, matrix, buffers.normed)])
        fields = {
            **rows_of("x", buffers.normed),
            "weight": at(weight),
            **rows_of("out", buffers.x),
            "count": self._plan.hidden // 16,
            "eps": bits(self._plan.eps),
        }
        self._stage(library.shared().address["added"], tokens, fields, stages.ADDED)

    def _norm(self, weight: Array, count: int) -> None:
        buffers = self._buffers
        fields = {
            **rows_of("x", buffers.x),
            "chosen": at(self._tables.every),
            "weight": at(weight),
            **rows_of("out", buffers.normed),
            "count": self._plan.hidden // 16,
            "eps": bits(self._plan.eps),
            **rows_of("sums", buffers.sums),
        }
        self._stage(library.shared().address["norm"], count, fields, stages.NORM)

    def _products(
        self,
        layer: int,
        x: Array,
        tokens: int,
        wanted: list[tuple[str, PackedMatrix, Array]],
        *,
        start: int = stages.ZERO,
    ) -> None:
        """Products of the same inputs side by side, by name, with what adapters add to them."""
        buffers, rows = self._buffers, library.padded_rows(tokens)
        adapted = self._adapted(layer, wanted)
        if adapted is not None:
            self._lower(adapted, x)
        for _, matrix, out in wanted:
            stage = product(matrix, x, buffers.sums, out, rows, buffers.scratch, start)
            self._add(stage, last=matrix is wanted[-1][1])
        if adapted is not None:
            self._raise(adapted, wanted[0][2], tokens)

    def _adapted(self, layer: int, wanted: list[tuple[str, PackedMatrix, Array]]) -> Array | None:
        """The table of those products that adapters add to; None where they do to none."""
        if self._adapters is None:
            return None
        rank = self._buffers.ranks * FLOAT_BYTES
        found = []
        for place, (name, matrix, out) in enumerate(wanted):
            table = self._adapters.table((layer, name))
            if table is not None:
                further = at(out) - at(wanted[0][2])
                found.append((at(table), place * rank, further, matrix.blocks // lowrank.WIDE))
        if not found:
            return None
        self._held.append(np.array(found, np.int64))
        return self._held[-1]

    def _lower(self, adapted: Array, x: Array) -> None:
        fields = {
            **rows_of("x", x),
            **self._whose(adapted),
            "count": x.shape[1] // 16,
        }
        self._adapting.append((len(self._records), 1))
        code = library.shared().address["lowered"]
        self._add(StageRecord.of(code, 0, fields, lowrank.LOWERED), last=False)

    def _raise(self, adapted: Array, out: Array, tokens: int) -> None:
        widest = int(adapted[:, lowrank.MEMBERS.index("wide")].max())
        # Where there are few tokens, each is shared between threads.
        part = widest if tokens >= 2 * len(self._buffers.scratch) else _PART
        parts = -(-widest // part)
        fields = {
            **rows_of("out", out),
            **self._whose(adapted),
            "parts": parts,
            "part": part,
        }
        self._adapting.append((len(self._records), parts))
        code = library.shared().address["raised"]
        self._add(StageRecord.of(code, 0, fields, lowrank.RAISED))

    def _whose(self, adapted: Array) -> dict[str, int]:
        tables = self._tables
        return {
            "chosen": at(tables.adapted),
            "slots": at(tables.slots),
            "members": at(adapted),
            "size": len(adapted),
            **rows_of("low", self._buffers.low),
        }

    def _heads(self, number: int, layer: LayerPlan, tokens: int) -> None:
        plan, tables = self._plan, self._tables
        cosines, sines = self._angles[layer.angles]
        fields = {
            **rows_of("x", self._heads_of[number]),
            "queries": plan.queries,
            "heads": plan.heads,
            "size": plan.head_size // 16,
            "half": plan.head_size // 32,
            "query_norm": at(layer.query_norm) if layer.query_norm is not None else 0,
            "key_norm": at(layer.key_norm) if layer.key_norm is not None else 0,
            "eps": bits(plan.eps),
            "factor": bits(plan.scale),
            "cosines": at(cosines),
            "sines": at(sines),
            "angle_row": cosines.strides[0],
            "turns": at(tables.positions),
            "places": at(tables.places),
            "rows": at(tables.rows),
            "keys": at(tables.keys[number]),
            "values": at(tables.values[number]),
            "strides": at(tables.strides[number]),
        }
        self._stage(library.shared().address["headed"], tokens, fields, stages.HEADS)

    def _attend(self, number: int, layer: LayerPlan, few: bool) -> None:
        plan, tables, buffers = self._plan, self._tables, self._buffers
        fields = {
            "items": at(tables.items),
            **rows_of("x", self._heads_of[number]),
            "keys": at(tables.keys[number]),
            "values": at(tables.values[number]),
            "strides": at(tables.strides[number]),
            "size": plan.head_size // 16,
            "group": plan.queries // plan.heads,
            "window": layer.window,
            **rows_of("out", buffers.attended),
            **rows_of("sums", buffers.sums),
            "scratch": at(buffers.scratch),
            "scratch_bytes": buffers.scratch.shape[1],
            "parts": at(buffers.parts),
            "part_stats": at(buffers.part_stats),
        }
        code = library.shared().address
        self._attending.append(len(self._records))
        self._stage(code["attended4" if few else "attended"], 0, fields, attention.ATTEND)
        self._merging.append(len(self._records))
        self._stage(code["merged"], 0, fields | {"items": at(tables.merges)}, attention.MERGE)

    def _gate(self, tokens: int) -> None:
        buffers = self._buffers
        half = self._plan.intermediate
        fields = {
            "gate": at(buffers.fed),
            "up": at(buffers.fed) + half * FLOAT_BYTES,
            "row": buffers.fed.strides[0],
            **rows_of("out", buffers.active),
            "count": half // 16,
            **rows_of("sums", buffers.sums),
        }
        self._stage(library.shared().address[self._plan.activation], tokens, fields, stages.GATE)


def _floats(rows: int, width: int) -> Array:
    return aligned((rows, -(-width // 16) * 16), np.float32)
