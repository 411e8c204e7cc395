"""What the tier knows of nodes and files: in memory, and as the index keeps it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from millrace.cache.payload import Payload


@dataclass(frozen=True)
class FileRef:
    """What the index knows of a file."""

    id: int
    size: int
    crc: int
    length: int
    """Tokens on axis 2; 0 for a checkpoint."""


@dataclass(frozen=True)
class IndexRow:
    """What the index knows of a node."""

    id: int
    parent: int
    salt: str
    tokens: array[int]
    segment: FileRef | None
    lo: int
    hi: int
    checkpoint: FileRef | None
    used: float


@dataclass(frozen=True)
class Changes:
    """What the index has to learn: rows to delete, then rows to write, then times of use."""

    wipe: bool = False
    gone: list[int] = field(default_factory=list)
    rows: list[IndexRow] = field(default_factory=list)
    used: list[tuple[int, float]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.wipe or self.gone or self.rows or self.used)


@dataclass(eq=False)
class Blob:
    """A file, or what will be one: the payload is there until it is written."""

    id: int
    size: int
    length: int
    payload: Payload | None = None
    head: bytes = b""
    crc: int = 0
    written: bool = False
    late: bool = False
    """It came after its node: without it, the node is still worth having."""
    users: set[int] = field(default_factory=set)
    readers: int = 0
    """Reads that still need it: the file stays as long."""

    @property
    def ref(self) -> FileRef:
        return FileRef(self.id, self.size, self.crc, self.length)


@dataclass(eq=False)
class DiskNode:
    id: int
    parent: int
    salt: str
    tokens: array[int]
    used: float
    segment: Blob | None = None
    lo: int = 0
    hi: int = 0
    checkpoint: Blob | None = None
    children: set[int] = field(default_factory=set)
    row: bool = False
    """The index has a row of it, be it an older one."""
    announce: bool = False
    """The engine is to hear what is stored of it."""

    @property
    def blobs(self) -> list[Blob]:
        return [b for b in (self.segment, self.checkpoint) if b is not None]

    @property
    def share(self) -> int:
        """Its part of the bytes of its files."""
        total = self.checkpoint.size if self.checkpoint else 0
        if self.segment:
            total += self.segment.size * (self.hi - self.lo) // max(self.segment.length, 1)
        return total
