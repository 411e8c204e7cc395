"""What the disk tier says to the engine: the nodes it found, and what has happened since."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.cache.payload import Payload
from millrace.errors import MillraceError


class DiskUnavailable(MillraceError):
    """The folder cannot be used as it is; the message names it and the remedy."""

    code = "disk_cache_unavailable"


@dataclass(frozen=True)
class StoredNode:
    """One node of the tree as it lies on disk."""

    id: int
    parent: int
    """0 is the root of its salt."""
    salt: str
    tokens: list[int]
    file: int | None
    """The file of its segment; None if the node has at most a checkpoint."""
    lo: int
    hi: int
    """The node's tokens are positions lo to hi of that file (axis 2 of each array)."""
    checkpoint: int | None
    """The file with the state at the node's end."""
    used: float


@dataclass(frozen=True)
class Stored:
    """What is now on disk of the node, and will be there after a restart."""

    node: int
    segment: bool
    checkpoint: bool


@dataclass(frozen=True)
class Dropped:
    """These nodes are not on disk, or not any more. Nothing stored lies below them."""

    nodes: list[int]


@dataclass(frozen=True)
class PayloadsRead:
    """The answer to one read: the segment and the checkpoint of each node, where wanted."""

    ticket: int
    payloads: dict[int, tuple[Payload | None, Payload | None]] | None
    """The nodes that were read in full; None if there is not one."""
    failed: list[int] = field(default_factory=list)
    """The wanted nodes that are not among them."""


@dataclass(frozen=True)
class Trouble:
    """Something a person should know; each kind is told once."""

    message: str
    kind: str = ""
    off: bool = False
    """No more is written from here on."""


Event = Stored | Dropped | PayloadsRead | Trouble
