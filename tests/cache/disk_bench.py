"""What the tests of the disk tier share: payloads that tell where they come from, and waiting."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millrace.cache.disk import DiskTier, Dropped, Event, PayloadsRead
from millrace.cache.payload import Payload

PATIENCE = 120.0
"""Seconds for what takes a moment on an idle machine."""

MARK = "0123456789abcdef" * 4
MIB = 1 << 20

E = TypeVar("E", bound=Event)


def tier(folder: Path, budget: int = 64 * MIB, mark: str = MARK, **kwargs: Any) -> DiskTier:
    return DiskTier(folder, mark, budget, **{"keep_free": 0, **kwargs})


def segment(node: int, tokens: int, width: int = 3) -> Payload:
    rng = np.random.default_rng(node)
    return Payload(
        {
            "0.k": rng.integers(0, 1 << 16, (1, 2, tokens, width), dtype=np.uint16),
            "0.v": rng.standard_normal((1, 1, tokens, 2)).astype(np.float32),
            "1.k": rng.integers(0, 256, (1, 1, tokens, 5), dtype=np.uint8),
        },
        f"segment of {node}",
    )


def state(node: int, size: int = 7) -> Payload:
    rng = np.random.default_rng(-node & 0xFFFF)
    return Payload({"s": rng.standard_normal((1, size)), "n": np.array(node)}, f"state of {node}")


def same(a: Payload | None, b: Payload | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        a.meta == b.meta
        and list(a.arrays) == list(b.arrays)
        and all(
            x.dtype == b.arrays[n].dtype and np.array_equal(x, b.arrays[n])
            for n, x in a.arrays.items()
        )
    )


def part(whole: Payload, lo: int, hi: int) -> Payload:
    return Payload({n: a[:, :, lo:hi] for n, a in whole.arrays.items()}, whole.meta)


class Watch:
    """Collects a tier's events; the ones looked for can be in any order among others."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.events: list[Event] = []
        self._ticket = 1000

    def of(self, kind: type[E]) -> list[E]:
        self.events += self.tier.poll()
        return [e for e in self.events if isinstance(e, kind)]

    def until(self, kind: type[E], suits: Callable[[E], bool] = lambda _: True) -> E:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = [e for e in self.of(kind) if suits(e)]
            if found:
                return found[0]
            time.sleep(0.001)
        raise TimeoutError(f"no such {kind.__name__} among {self.events}")

    def dropped(self) -> set[int]:
        return {id for event in self.of(Dropped) for id in event.nodes}

    def read(self, *wants: tuple[int, bool, bool]) -> PayloadsRead:
        self._ticket += 1
        self.tier.read(self._ticket, list(wants))
        return self.until(PayloadsRead, lambda e: e.ticket == self._ticket)

    def one(self, node: int, *, checkpoint: bool = False) -> Payload | None:
        loaded = self.read((node, not checkpoint, checkpoint))
        return loaded.payloads[node][checkpoint] if loaded.payloads else None


def settled(tier: DiskTier) -> DiskTier:
    assert tier.settle(PATIENCE)
    return tier


def home(folder: Path, mark: str = MARK) -> Path:
    return folder / mark[:16]


def payload_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if re.fullmatch(r"\d+\.\w+", p.name))


def size_on_disk(folder: Path) -> int:
    """All bytes below a folder at this moment; files that go meanwhile count nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                pass
    return total


def check(tier: DiskTier, folder: Path) -> None:
    """Parents first, every file known, every file there, nothing unfinished."""
    seen = {0}
    files: set[int] = set()
    for node in tier.nodes():
        assert node.parent in seen
        seen.add(node.id)
        assert node.file is None or node.hi - node.lo == len(node.tokens)
        files |= {f for f in (node.file, node.checkpoint) if f is not None}
    assert {p.name for p in payload_files(folder)} == {f"{f}.safetensors" for f in files}
    assert size_on_disk(folder) <= tier.bytes
