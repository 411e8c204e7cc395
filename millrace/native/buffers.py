"""The memory of a pass: what its records point to, and what differs from pass to pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millrace.native import attention
from millrace.native.packing import Array, aligned
from millrace.native.plan import Plan
from millrace.native.products import SUMS
from millrace.native.records import unpacked_bytes

SIDE_BY_SIDE = 3
"""Products of the same inputs, at most: queries, keys and values."""


class PassTables:
    """What differs from pass to pass: tokens, positions, where keys and values lie, items of attention."""

    def __init__(self, layers: int, tokens: int, blocks: int, items: int) -> None:
        self.tokens = aligned((tokens,), np.int64)
        self.positions = aligned((tokens,), np.int64)
        """How far a token's queries and keys are rotated."""
        self.every = np.arange(tokens, dtype=np.int64)
        self.chosen = aligned((tokens,), np.int64)
        """The tokens whose logits are wanted."""
        self.slots = aligned((tokens,), np.int64)
        self.adapted = aligned((tokens,), np.int64)
        """The tokens that have an adapter."""
        self.head_slots = aligned((tokens,), np.int64)
        self.head_adapted = aligned((tokens,), np.int64)
        """Both again among the tokens whose logits are wanted."""
        self.keys = aligned((layers, 1), np.int64)
        self.values = aligned((layers, 1), np.int64)
        """Where a layer's memory begins."""
        self.strides = aligned((layers, 1), np.int64)
        """Bytes from head to head."""
        self.targets = aligned((layers, tokens), np.int64)
        """Where a token's keys and values are written, as an offset into the layer's memory."""
        self.blocks = aligned((layers, blocks), np.int64)
        """Where the blocks of all sequences lie, as offsets into the layer's memory."""
        self.items = aligned((items, len(attention.ITEM)), np.int64)
        self.merges = aligned((items, len(attention.ITEM)), np.int64)

    def note_adapters(
        self, slots: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]
    ) -> tuple[int, int]:
        """Write which tokens have an adapter, and which; the head sees the wanted ones alone. How many
        these are."""
        chosen, of_head = np.flatnonzero(slots), np.flatnonzero(slots[wanted])
        self.slots[: len(slots)] = slots
        self.adapted[: len(chosen)] = chosen
        self.head_slots[: len(wanted)] = slots[wanted]
        self.head_adapted[: len(of_head)] = of_head
        return len(chosen), len(of_head)


class Buffers:
    """The floats of a pass: each row of a buffer is one token's."""

    def __init__(
        self, plan: Plan, tokens: int, logits: int, parts: int, threads: int, ranks: int = 0
    ) -> None:
        size = plan.head_size
        attended = plan.queries * size
        widest = max(plan.hidden, plan.intermediate, attended)
        self.x = _floats(tokens, plan.hidden)
        self.normed = _floats(tokens, plan.hidden)
        self.heads = _floats(tokens, attended + 2 * plan.heads * size)
        self.attended = _floats(tokens, attended)
        self.fed = _floats(tokens, 2 * plan.intermediate)
        self.active = _floats(tokens, plan.intermediate)
        self.sums = _floats(tokens, widest // SUMS)
        self.logits = _floats(logits, plan.head.blocks * 16)
        self.ranks = ranks
        self.low = _floats(tokens, SIDE_BY_SIDE * ranks)
        self.parts = _floats(parts * attention.MOST_SPLIT, size)
        self.part_stats = _floats(parts * attention.MOST_SPLIT, 2)
        layer = plan.layers[0]
        own = max(
            attention.scratch_bytes(size),
            unpacked_bytes((layer.out, layer.down, layer.gate, plan.head)),
        )
        self.scratch = aligned((threads, -(-own // 4096) * 4096), np.uint8)


def _floats(rows: int, width: int) -> Array:
    return aligned((rows, -(-width // 16) * 16), np.float32)
