"""What the store tells the index, of the disk above all, as plain data: no arrays, no paths, no clocks."""

from __future__ import annotations

import msgspec


class Observation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all observations; their tag is the name of the class."""


class FoundOnDisk(Observation, frozen=True):
    """A node that the disk had at the start; parents come before their children."""

    node: int
    parent: int
    """0 is the root of its salt."""
    salt: str
    tokens: tuple[int, ...]
    checkpoint: bool
    age: float
    """Seconds since its last use."""


class ReadNode(msgspec.Struct, frozen=True, array_like=True):
    """One node of what was read: the tokens of its segment (0: none), and whether its checkpoint."""

    node: int
    tokens: int
    checkpoint: bool


class ReadFromDisk(Observation, frozen=True):
    """The answer to one `operations.ReadDisk`."""

    ticket: int
    nodes: tuple[ReadNode, ...]
    failed: tuple[int, ...] = ()
    """Nodes that could not be read, and are not on disk any more."""


class StoredOnDisk(Observation, frozen=True):
    """The node is on disk to stay; whether its checkpoint is, too."""

    node: int
    checkpoint: bool


class GoneFromDisk(Observation, frozen=True):
    """These nodes are not on disk, or not any more. Nothing stored lies below them."""

    nodes: tuple[int, ...]


class DiskTrouble(Observation, frozen=True):
    """Something a person should know. With `off`, the disk takes no more writes."""

    message: str
    off: bool = False


class DiskUsage(Observation, frozen=True):
    """Bytes on disk, and bytes that wait to be written."""

    nbytes: int
    backlog: int


class LostState(Observation, frozen=True):
    """What was to be kept is not there, because its source had failed: segments and checkpoints."""

    nodes: tuple[int, ...]
    checkpoints: tuple[int, ...]


AnyObservation = (
    FoundOnDisk | ReadFromDisk | StoredOnDisk | GoneFromDisk | DiskTrouble | DiskUsage | LostState
)
"""For encoders and decoders."""
