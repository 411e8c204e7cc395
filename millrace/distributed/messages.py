"""What a server and the workers of its ranks say to each other: who is to load what, and how they are.

This goes beside the collectives, on a connection of its own: a collective that waits cannot tell that it
waits in vain.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.config import EngineConfig

CONTROL = "control"
"""What a server connects to a worker for."""
VISIT = "visit"
"""What others connect for who only look and measure: it disturbs nobody."""
BEAT_SECONDS = 0.5
SILENT_SECONDS = 3.5
"""Without a word for so long, the other side is believed to be gone."""
CANNOT_START = 3
DRIFTED = 4
PEER_LOST = 5
"""How a follower ends that could not begin, whose state is another's, and that lost somebody else."""


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size: int
    digest: str = ""
    """Of a small file."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load this part of a model, whose files should be these."""

    config: EngineConfig
    files: tuple[ModelFile, ...] = ()


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Let go of it, and wait for another."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Bytes that are only there to be timed."""

    data: bytes
    echo: bool = True


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Time the way to another rank's worker."""

    rank: int
    address: str
    port: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """See whether the model is there that `Start` would load."""

    config: EngineConfig
    files: tuple[ModelFile, ...] = ()


ToWorker = Start | Stop | Ping | Probe | Measure | Look

WorkerState = Literal["waiting", "running", "ended"]


class Beat(msgspec.Struct, tag=True):
    """How a worker and its follower are."""

    state: WorkerState
    stage: str = ""
    pid: int | None = None
    silent: float = 0.0
    """Seconds for which the follower has given no sign of life."""
    turns: int = 0
    checks: int = 0
    weight_bytes: int = 0
    peak_bytes: int = 0
    code: int | None = None
    """How the follower has ended."""
    error: str = ""


class Line(msgspec.Struct, frozen=True, tag=True):
    """A line of the follower's log."""

    text: str


class About(msgspec.Struct, frozen=True, tag=True):
    """What a worker's machine has; the first thing it says."""

    versions: dict[str, str]
    memory: int
    models: tuple[str, ...] = ()


class Echo(msgspec.Struct, frozen=True, tag=True):
    data: bytes


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The way to another rank."""

    rank: int
    seconds: float = 0.0
    """There and back, of a small message."""
    rate: float = 0.0
    """Bytes a second, of a large one."""
    problem: str = ""


class Looked(msgspec.Struct, frozen=True, tag=True):
    problem: str = ""
    """Why the model cannot be loaded; empty if it can."""


FromWorker = Beat | Line | About | Echo | Measured | Looked

encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
