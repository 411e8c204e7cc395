"""What the front and an engine say to each other of the prefix cache: what requests found in it, what it
holds, and what became of its tree.
"""

from __future__ import annotations

from typing import Literal

import msgspec

HitKind = Literal["exact", "prefix", "checkpoint", "disk", "none"]
"""All of a prompt but its last token was found; a part of it; state at a boundary before the end of
what is known; anything that had to be read from disk; nothing."""


class CacheQuery(msgspec.Struct, tag="cache_query"):
    """Asks for a CacheReport, after dropping all that is cached if `clear` says so."""

    id: str
    clear: bool = False


class TierReport(msgspec.Struct):
    """One tier of the prefix cache."""

    budget: int
    bytes: int = 0
    entries: int = 0
    tokens: int = 0
    """Tokens whose state it holds."""
    hits: int = 0
    """Requests that found something here."""
    tokens_saved: int = 0
    evicted_bytes: int = 0
    error: str | None = None
    """Why it is off, where it should be on."""


class CacheReport(msgspec.Struct, tag="cache_report"):
    id: str
    enabled: bool
    memory: TierReport
    disk: TierReport | None
    hits: dict[HitKind, int]
    """Requests by what they found."""


class RunKept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The state of these tokens, after those of the parent's line, can be found again."""

    node: int
    parent: int
    """0 is the root."""
    tokens: list[int]


class RunCut(msgspec.Struct, frozen=True, array_like=True, tag="cut"):
    """The node's first `at` tokens are the new node `upper` above it."""

    node: int
    at: int
    upper: int


class RunsMerged(msgspec.Struct, frozen=True, array_like=True, tag="merged"):
    """A node and its only child are the new node `into`."""

    upper: int
    lower: int
    into: int


class RunsGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """These nodes, and with each of them all below it, are forgotten."""

    nodes: list[int]


class AllGone(msgspec.Struct, frozen=True, array_like=True, tag="all_gone"):
    pass


CacheChange = RunKept | RunCut | RunsMerged | RunsGone | AllGone


class CacheChanged(msgspec.Struct, tag="cache_changed"):
    """What became of the prefix cache's tree, in order, for who keeps a copy of it; runs that only
    requests with a salt find are not told."""

    changes: list[CacheChange]
