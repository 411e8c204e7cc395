"""What the prefix cache's index decides, as plain data for the store to carry out in order.

Numbers and strings only: a list of operations can be recorded, sent to another rank and carried out
again. Nodes are named by the index's ids. A source is whoever has the state at hand: a row of the
batch or a prefill, by the engine's own number.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Whose state it is; the executor finds the caches by the number."""

    kind: Literal["row", "prefill"]
    number: int


class Operation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all operations; their tag is the name of the class."""


class Keep(Operation, frozen=True):
    """The state of the source's tokens start … end-1 becomes the segment of the new node."""

    node: int
    source: Source
    start: int
    end: int


class KeepState(Operation, frozen=True):
    """The source's layers that cannot be cut, as they are now, become the node's checkpoint."""

    node: int
    source: Source


class Split(Operation, frozen=True):
    """The node's first `at` tokens become the new node `upper` above it; a checkpoint stays."""

    node: int
    at: int
    upper: int


class Merge(Operation, frozen=True):
    """A node and its only child become the new node `into`, with the child's checkpoint.

    A new id, not one of the two: what the disk still says of those cannot be taken for it.
    """

    upper: int
    lower: int
    into: int


class Evict(Operation, frozen=True):
    """The node's segment leaves the memory."""

    node: int


class EvictState(Operation, frozen=True):
    """The node's checkpoint leaves the memory."""

    node: int


class Restore(Operation, frozen=True):
    """Make the caches of a prefill after its first `at` tokens.

    The nodes' segments follow each other from the first token and hold at least `at`. The holder
    (0: none is needed) has the checkpoint, made after `holder_at` tokens and cut back to `at`.
    """

    prefill: int
    at: int
    nodes: tuple[int, ...]
    holder: int = 0
    holder_at: int = 0


class NodeWant(msgspec.Struct, frozen=True, array_like=True):
    node: int
    segment: bool
    checkpoint: bool


class ReadDisk(Operation, frozen=True):
    """Begin to read; `observations.ReadFromDisk` with the ticket answers."""

    ticket: int
    wants: tuple[NodeWant, ...]


class Fill(Operation, frozen=True):
    """Take what was read for the ticket into memory: the node's segment, its checkpoint."""

    ticket: int
    node: int
    segment: bool
    checkpoint: bool
    start: int = 0
    """Tokens before the node's."""
    parent: int = 0
    """The node before it, whose segment is in memory; 0 is the root."""


class Discard(Operation, frozen=True):
    """Let go of all else that was read for the ticket."""

    ticket: int


class WriteDisk(Operation, frozen=True):
    """Hand the node's segment, its checkpoint or both to the disk, below the parent (0: the root)."""

    node: int
    parent: int
    salt: str
    tokens: tuple[int, ...]
    segment: bool
    checkpoint: bool


class WriteState(Operation, frozen=True):
    """Hand a checkpoint to the disk, whose node is there already."""

    node: int


class SplitDisk(Operation, frozen=True):
    """`Split`, on disk."""

    node: int
    at: int
    upper: int


class ForgetDisk(Operation, frozen=True):
    """The nodes and all below them leave the disk."""

    nodes: tuple[int, ...]


class TouchDisk(Operation, frozen=True):
    """The nodes were used now."""

    nodes: tuple[int, ...]


class Clear(Operation, frozen=True):
    """Everything leaves memory and disk."""


AnyOperation = (
    Keep
    | KeepState
    | Split
    | Merge
    | Evict
    | EvictState
    | Restore
    | ReadDisk
    | Fill
    | Discard
    | WriteDisk
    | WriteState
    | SplitDisk
    | ForgetDisk
    | TouchDisk
    | Clear
)
"""For encoders and decoders."""
