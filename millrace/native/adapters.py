"""The adapters of a model that our own kernels run: their factors packed, and tables of where they lie.

Nothing is padded to what another adapter has: each has its own memory, and a token's slot leads to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from millrace.native.lowrank import FACTORS, STEP
from millrace.native.packing import SIDE_BY_SIDE, Array, PackedMatrix, aligned
from millrace.native.plan import Plan

MOST_SLOTS = 256
HEAD = -1
"""The number of the layer that the model's head counts as."""
MODULES = {
    "self_attn.q_proj": "queries",
    "self_attn.k_proj": "keys",
    "self_attn.v_proj": "values",
    "self_attn.o_proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
"""mlx-lm's names of a layer's modules, and the plan's."""
Module = tuple[int, str]
"""A layer's number, and the plan's name of one of its matrices."""


class LowRank(Protocol):
    """Two factors: (inputs, rank) and (rank, outputs)."""

    @property
    def a(self) -> Array: ...

    @property
    def b(self) -> Array: ...


class NativeAdapters:
    def __init__(self, plan: Plan) -> None:
        self._matrices = dict(_matrices(plan))
        self.slots: set[int] = set()
        self.rows: tuple[int, ...] = ()
        """The slots of the rows that run next; empty where none of them has an adapter."""
        self.changes = 0
        """How often what programs are written from has changed."""
        self._held: dict[tuple[Module, int], tuple[Array, Array]] = {}
        self._tables: dict[Module, Array] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: (m.inputs, m.outputs) for name, (_, m) in self._matrices.items()}

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self._held.values())

    @property
    def steps(self) -> int:
        """Steps of ranks of the adapter that has most."""
        return max((len(a) // STEP for a, _ in self._held.values()), default=0)

    def table(self, module: Module) -> Array | None:
        """Where the factors of a module lie, by slot; None where no adapter changes it."""
        return self._tables.get(module)

    def needs(self, slot: int, modules: Mapping[str, LowRank]) -> int:
        others = sum(a.nbytes + b.nbytes for (_, s), (a, b) in self._held.items() if s != slot)
        own = 0
        for name, factors in modules.items():
            matrix = self._matrices[name][1]
            own += 4 * _up(factors.a.shape[1], STEP) * (matrix.inputs + _columns(matrix))
        return others + own

    def place(self, slot: int, modules: Mapping[str, LowRank]) -> None:
        if not 0 < slot < MOST_SLOTS:
            raise ValueError(f"There are {MOST_SLOTS - 1} slots for adapters.")
        packed = {
            self._matrices[name][0]: _packed(self._matrices[name][1], factors)
            for name, factors in modules.items()
        }
        self.remove(slot)
        for module, (a, b) in packed.items():
            self._held[module, slot] = a, b
            table = self._tables.setdefault(module, aligned((MOST_SLOTS, len(FACTORS)), np.int64))
            table[slot] = a.ctypes.data, b.ctypes.data, len(a) // STEP
        self.slots.add(slot)
        self.changes += 1

    def remove(self, slot: int) -> None:
        """No program runs now: what it points to may go."""
        self.slots.discard(slot)
        for module, of in [key for key in self._held if key[1] == slot]:
            self._tables[module][slot] = 0
            del self._held[module, of]
        used = {module for module, _ in self._held}
        self._tables = {module: t for module, t in self._tables.items() if module in used}
        self.changes += 1

    def use(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows) if any(rows) else ()


def _matrices(plan: Plan) -> Any:
    for number, layer in enumerate(plan.layers):
        for theirs, ours in MODULES.items():
            yield f"model.layers.{number}.{theirs}", ((number, ours), getattr(layer, ours))
    if plan.head is not plan.embedding:
        yield "lm_head", ((HEAD, "head"), plan.head)


def _packed(matrix: PackedMatrix, factors: LowRank) -> tuple[Array, Array]:
    """The first factor's columns one after the other, the second one's rows, padded with zeros."""
    rank = factors.a.shape[1]
    a = aligned((_up(rank, STEP), matrix.inputs), np.float32)
    b = aligned((_up(rank, STEP), _columns(matrix)), np.float32)
    a[:rank] = factors.a.T
    b[:rank, : matrix.outputs] = factors.b
    return a, b


def _columns(matrix: PackedMatrix) -> int:
    return _up(matrix.outputs, SIDE_BY_SIDE)


def _up(count: int, to: int) -> int:
    return -(-count // to) * to
