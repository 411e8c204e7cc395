"""What is known about one request after it ended, and the results of a whole run."""

from __future__ import annotations

from typing import Literal

import msgspec

FailureKind = Literal["rejected", "http", "connect", "timeout", "cut", "stream_error", "bad_stream"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request failed; `rejected` is a 429, told apart because it is an answer to load."""

    kind: FailureKind
    status: int | None = None
    message: str = ""

    @property
    def label(self) -> str:
        if self.kind == "rejected":
            return "429"
        return f"HTTP {self.status}" if self.kind == "http" else self.kind.replace("_", " ")


class RequestSample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it. Times are in seconds."""

    round: int
    started: float
    """On the run's clock."""
    e2e: float
    max_tokens: int
    ttft: float | None = None
    """To the first generated text; None when there was none."""
    gaps: tuple[float, ...] = ()
    """Between one text event and the next."""
    events: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def tokens(self) -> int:
        """As the server's usage counts them; one per text event where it sends no usage."""
        return self.events if self.completion_tokens is None else self.completion_tokens


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A server under test."""

    name: str
    url: str
    """Up to and including the version, without a slash at the end."""
    model: str
    api_key: str | None = None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One load: a number of clients, a rate, or (neither) the arrivals of a trace."""

    clients: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'' if self.clients == 1 else 's'}"
        return "trace arrivals" if self.rate is None else f"{self.rate:g} requests/s"


class Cell(msgspec.Struct):
    """The samples of one target at one level."""

    target: BenchTarget
    level: Level
    samples: list[RequestSample] = msgspec.field(default_factory=list)


class Results(msgspec.Struct):
    """All cells, by level and then by target in the order given; filled while the run goes on."""

    targets: list[BenchTarget]
    levels: list[Level]
    cells: list[Cell]

    @classmethod
    def empty(cls, targets: list[BenchTarget], levels: list[Level]) -> Results:
        return cls(targets, levels, [Cell(t, level) for level in levels for t in targets])

    def row(self, level: int) -> list[Cell]:
        """One level's cells."""
        width = len(self.targets)
        return self.cells[level * width : (level + 1) * width]
