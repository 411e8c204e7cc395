"""What the first rank and its followers say to each other, as data."""

from __future__ import annotations

import zlib
from typing import Literal

import msgspec

from millrace.cache.observations import AnyObservation, FoundOnDisk
from millrace.cache.operations import AnyOperation
from millrace.engine.turn import RowResult, Turn

FloatKind = Literal["float32", "float16", "bfloat16"]


class Block(msgspec.Struct, array_like=True):
    """An array as plain bytes, little-endian."""

    dtype: FloatKind
    shape: tuple[int, ...]
    data: memoryview


class PictureFeatures(msgspec.Struct, array_like=True):
    """What a picture has become on the first rank, which alone has a vision tower."""

    digest: str
    embeddings: Block
    deep: list[Block] = []
    per_layer: Block | None = None


class Order(msgspec.Struct, tag=True):
    """A turn to carry out, after what the turns before it have brought has been taken note of."""

    turn: Turn
    taken: list[RowResult] = []
    shown: list[PictureFeatures] = []
    check: int | None = None
    """What the first rank's state comes to before the turn; another's has to be the same."""


class Go(msgspec.Struct, tag=True):
    """All are there: join the group of the collectives."""


class Close(msgspec.Struct, tag=True):
    """There will be no more."""

    taken: list[RowResult] = []
    shown: list[PictureFeatures] = []
    check: int = 0
    writes: list[AnyOperation] = []
    """What is still to be written to disk."""


class Known(msgspec.Struct, tag=True):
    """Of what is on disk, all ranks have these nodes; the others are to be forgotten."""

    nodes: list[int]


FromLeader = Order | Go | Close | Known


class Share(msgspec.Struct, tag=True):
    """What a rank has loaded, and has room for."""

    rank: int
    weight_bytes: int
    row_bytes: int
    """Of a row of 1,024 tokens."""
    kv_bytes: int
    """For the state of running requests."""
    cache_bytes: int
    """For the prefix cache."""
    picture_bytes: int = 0
    """For what pictures have become."""
    found: list[FoundOnDisk] = []
    """What its disk has."""


class Observed(msgspec.Struct, tag=True):
    """What has happened on a follower's disk."""

    seen: list[AnyObservation]


class Closed(msgspec.Struct, tag=True):
    """A follower's last word."""

    checks: int
    """How often its state was compared and found the same."""


FromFollower = Share | Closed | Observed

encoder = msgspec.msgpack.Encoder()
from_leader = msgspec.msgpack.Decoder(FromLeader)
from_follower = msgspec.msgpack.Decoder(FromFollower)


def checksum(state: object) -> int:
    """One number for a state of plain values."""
    return zlib.crc32(encoder.encode(state))
