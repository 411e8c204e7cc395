"""A forward pass written down: the records of its stages.

A program is written once for each kind of pass and used again: the numbers of tokens and logits are set
before each pass, and what else differs lies in tables that the records point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millrace.native import attention, library, lowrank, stages
from millrace.native.adapters import HEAD, NativeAdapters
from millrace.native.buffers import Buffers, PassTables
from millrace.native.packing import Array, PackedMatrix
from millrace.native.plan import LayerPlan, Plan
from millrace.native.products import FLOAT_BYTES
from millrace.native.records import (
    StageRecord,
    at,
    bits,
    embedding,
    product,
    rows_of,
)

_FIELDS = 24
_PART = 4
"""Of the outputs that an adapter adds to a token, so many times 64 are a unit's where tokens are few."""
UNITS = stages.HEAD.index("units")
_ROWS = len(stages.HEAD) + stages.PRODUCT.index("rows")


@dataclass(frozen=True)
class PassKind:
    """What a program is written for: which kernels run, and whether adapters do."""

    streamed: int
    """Rows that weights are streamed for; 0 where tokens are so many that their products are tiled."""
    logits: int | None
    """Likewise of the head; None where no logits are wanted."""
    few: bool
    """Whether small tiles suit the items of attention."""
    shared: tuple[bool, bool] | None
    """Whether the outputs that an adapter adds to a token are shared between threads, and to a token's
    logits; None where no token has an adapter."""
    peek: bool

    @classmethod
    def of(
        cls, tokens: int, logits: int, threads: int, few: bool, adapted: bool, peek: bool
    ) -> PassKind:
        shared = tokens < 2 * threads, logits < 2 * threads
        head = _streamed(logits) if logits else None
        return cls(_streamed(tokens), head, few, shared if adapted else None, peek)

    @property
    def adapted(self) -> bool:
        return self.shared is not None


def _streamed(count: int) -> int:
    rows = library.padded_rows(count)
    return rows if rows in library.streamed_rows() else 0


@dataclass
class PassStages:
    """The stages of a program whose units or rows are set before each pass, by their number."""

    tokens: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    """Those whose units are tokens, and tokens whose logits are wanted."""
    products: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    """Those whose rows are tokens, and tokens whose logits are wanted."""
    attending: list[int] = field(default_factory=list)
    merging: list[int] = field(default_factory=list)
    """Those whose units are items of attention."""
    adapting: list[tuple[int, int, bool]] = field(default_factory=list)
    """Those whose units are of tokens with an adapter, how many of each, and if it is the head."""


class Program:
    def __init__(
        self, records: npt.NDArray[np.int64], stages: PassStages, held: list[Array]
    ) -> None:
        """`held` is what the records point to and nobody else holds."""
        self.records, self.stages, self._held = records, stages, held

    def count(self, tokens: int, logits: int, items: int, merges: int) -> None:
        """Set how much runs in the next pass."""
        records, stages = self.records, self.stages
        records[stages.tokens, UNITS] = tokens
        records[stages.products, _ROWS] = library.padded_rows(tokens)
        if logits:
            records[stages.logits, UNITS] = logits
            records[stages.heads, _ROWS] = library.padded_rows(logits)
        records[stages.attending, UNITS] = items
        records[stages.merging, UNITS] = merges

    def count_adapted(self, tokens: int, logits: int) -> None:
        """Set how many of the next pass's tokens, and of those whose logits are wanted, have adapters."""
        for stage, each, head in self.stages.adapting:
            self.records[stage, UNITS] = (logits if head else tokens) * each


class Writer:
    """Writes the records of one pass."""

    def __init__(
        self,
        kind: PassKind,
        plan: Plan,
        buffers: Buffers,
        tables: PassTables,
        angles: list[tuple[Array, Array]],
        adapters: NativeAdapters,
        heads: Sequence[Array],
    ) -> None:
        """A pass that is peeked at leaves each layer's queries, keys and values in its own of `heads`."""
        self._kind = kind
        self._plan, self._buffers, self._tables, self._angles = plan, buffers, tables, angles
        self._adapters = adapters if kind.adapted else None
        self._heads_of = heads if kind.peek else [buffers.heads] * len(plan.layers)
        self._held: list[Array] = []
        self._records: list[list[int]] = []
        self._together = 0
        """Stages that nobody has waited for."""
        self._stages = PassStages()

    def write(self) -> Program:
        plan, buffers = self._plan, self._buffers
        self._embed(plan.embedding)
        for number, layer in enumerate(plan.layers):
            self._norm(layer.norm)
            ends = np.cumsum([0, layer.queries.outputs, layer.keys.outputs])
            self._products(
                number,
                buffers.normed,
                [
                    (name, getattr(layer, name), self._heads_of[number][:, end:])
                    for name, end in zip(("queries", "keys", "values"), ends, strict=True)
                ],
            )
            self._heads(number, layer)
            self._attend(number, layer)
            self._branch(number, "out", buffers.attended, layer.out_norm)
            self._norm(layer.feed_norm)
            up = buffers.fed[:, plan.intermediate :]
            both = [("gate", layer.gate, buffers.fed), ("up", layer.up, up)]
            self._products(number, buffers.normed, both)
            self._gate()
            self._branch(number, "down", buffers.active, layer.down_norm)
        if self._kind.logits is not None:
            self._norm(plan.norm, head=True)
            self._products(HEAD, buffers.normed, [("head", plan.head, buffers.logits)])
        records = np.zeros((len(self._records), _FIELDS), np.int64)
        for record, fields in zip(records, self._records, strict=True):
            record[: len(fields)] = fields
        return Program(records, self._stages, self._held)

    def _stage(
        self, name: str, fields: dict[str, int], names: tuple[str, ...], counted: list[int]
    ) -> None:
        """A stage by its function's name; its units are set with those of the others `counted`."""
        counted.append(len(self._records))
        self._add(StageRecord.of(library.shared().address[name], 0, fields, names))

    def _add(self, stage: StageRecord, *, last: bool = True) -> None:
        """Without `last`, the next stage need not wait for this one."""
        self._together += 1
        waits, self._together = (self._together, 0) if last else (0, self._together)
        self._records.append(stage.record(waits))

    def _embed(self, matrix: PackedMatrix) -> None:
        factor = self._plan.embedding_factor
        self._stages.tokens.append(len(self._records))
        self._add(embedding(matrix, self._tables.tokens, 0, self._buffers.x, factor))

    def _branch(self, number: int, name: str, x: Array, weight: Array | None) -> None:
        """Add to the rows what a branch of the layer ends with, normed first where there is a norm."""
        buffers, matrix = self._buffers, getattr(self._plan.layers[number], name)
        if weight is None:
            self._products(number, x, [(name, matrix, buffers.x)], start=stages.KEEP)
            return
        self._products(number, x, [(name, matrix, buffers.normed)])
        fields = {
            **rows_of("x", buffers.normed),
            "weight": at(weight),
            **rows_of("out", buffers.x),
            "count": self._plan.hidden // 16,
            "eps": bits(self._plan.eps),
        }
        self._stage("added", fields, stages.ADDED, self._stages.tokens)

    def _norm(self, weight: Array, *, head: bool = False) -> None:
        buffers, tables, counted = self._buffers, self._tables, self._stages
        fields = {
            **rows_of("x", buffers.x),
            "chosen": at(tables.chosen if head else tables.every),
            "weight": at(weight),
            **rows_of("out", buffers.normed),
            "count": self._plan.hidden // 16,
            "eps": bits(self._plan.eps),
            **rows_of("sums", buffers.sums),
        }
        self._stage("norm", fields, stages.NORM, counted.logits if head else counted.tokens)

    def _products(
        self,
        layer: int,
        x: Array,
        wanted: list[tuple[str, PackedMatrix, Array]],
        *,
        start: int = stages.ZERO,
    ) -> None:
        """Products of the same inputs side by side, by name, with what adapters add to them."""
        buffers, head = self._buffers, layer == HEAD
        rows = (self._kind.logits if head else self._kind.streamed) or library.tile_shape()[0]
        adapted = self._adapted(layer, wanted)
        if adapted is not None:
            self._lower(adapted, x, head=head)
        for _, matrix, out in wanted:
            counted = self._stages.heads if head else self._stages.products
            counted.append(len(self._records))
            stage = product(matrix, x, buffers.sums, out, rows, buffers.scratch, start)
            self._add(stage, last=matrix is wanted[-1][1])
        if adapted is not None:
            self._raise(adapted, wanted[0][2], head=head)

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

    def _lower(self, adapted: Array, x: Array, *, head: bool) -> None:
        fields = {
            **rows_of("x", x),
            **self._whose(adapted, head),
            "count": x.shape[1] // 16,
        }
        self._stages.adapting.append((len(self._records), 1, head))
        code = library.shared().address["lowered"]
        self._add(StageRecord.of(code, 0, fields, lowrank.LOWERED), last=False)

    def _raise(self, adapted: Array, out: Array, *, head: bool) -> None:
        widest = int(adapted[:, lowrank.MEMBERS.index("wide")].max())
        assert self._kind.shared is not None
        part = _PART if self._kind.shared[head] else widest
        parts = -(-widest // part)
        fields = {
            **rows_of("out", out),
            **self._whose(adapted, head),
            "parts": parts,
            "part": part,
        }
        self._stages.adapting.append((len(self._records), parts, head))
        code = library.shared().address["raised"]
        self._add(StageRecord.of(code, 0, fields, lowrank.RAISED))

    def _whose(self, adapted: Array, head: bool) -> dict[str, int]:
        tables = self._tables
        return {
            "chosen": at(tables.head_adapted if head else tables.adapted),
            "slots": at(tables.head_slots if head else tables.slots),
            "members": at(adapted),
            "size": len(adapted),
            **rows_of("low", self._buffers.low),
        }

    def _heads(self, number: int, layer: LayerPlan) -> None:
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
            "targets": at(tables.targets[number]),
            "keys": at(tables.keys[number]),
            "values": at(tables.values[number]),
            "stride": at(tables.strides[number]),
        }
        self._stage("headed", fields, stages.HEADS, self._stages.tokens)

    def _attend(self, number: int, layer: LayerPlan) -> None:
        plan, tables, buffers = self._plan, self._tables, self._buffers
        fields = {
            "items": at(tables.items),
            **rows_of("x", self._heads_of[number]),
            "keys": at(tables.keys[number]),
            "values": at(tables.values[number]),
            "stride": at(tables.strides[number]),
            "blocks": at(tables.blocks[number]),
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
        counted, code = self._stages, "attended4" if self._kind.few else "attended"
        self._stage(code, fields, attention.ATTEND, counted.attending)
        fields |= {"items": at(tables.merges)}
        self._stage("merged", fields, attention.MERGE, counted.merging)

    def _gate(self) -> None:
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
        self._stage(self._plan.activation, fields, stages.GATE, self._stages.tokens)
