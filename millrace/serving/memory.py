"""What models take of the memory: weights, key-value memory in use, and what each may take at most."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from millrace.servers import Pool, ServerMemory, ServerRecord
from millrace.serving.instance import Instance
from millrace.sizes import format_bytes


class ModelMemory(msgspec.Struct, frozen=True):
    """Bytes of a model that is loaded."""

    weights: int
    kv_in_use: int
    """State of running requests, and prefixes that are kept in memory."""
    ceiling: int
    """The most that it may take: weights, work of its process, and all the state that was granted."""

    def in_words(self) -> str:
        weights, state, most = map(format_bytes, (self.weights, self.kv_in_use, self.ceiling))
        return f"weights {weights}, key-value memory {state} in use, at most {most} in all"


def memory_of(instance: Instance) -> ModelMemory:
    ready, held = instance.client.ready, instance.client.metrics.held
    # A load in progress has its weights in part; its ceiling is set aside for it already.
    weights = ready.weight_bytes if ready is not None and instance.reserved else 0
    return ModelMemory(weights, held.kv_bytes + held.cache_bytes, instance.reserved)


def held_by(instance: Instance) -> int:
    """Bytes that a model takes now, its process included as far as the system reports it."""
    if not instance.reserved:
        return 0
    memory, client = memory_of(instance), instance.client
    counted = memory.weights + memory.kv_in_use + client.adapters.nbytes
    ready, allocated = client.ready, client.memory
    if ready is None or client.group is not None:
        # What is about to be taken; of a split model, the ranks on this machine.
        return max(counted, instance.need.fixed if instance.need is not None else 0)
    if ready.device == "cpu":
        return max(counted, _resident(client.pid))
    return max(counted, allocated.active + allocated.cached if allocated is not None else 0)


def _resident(pid: int | None) -> int:
    """Bytes of RAM that a process has, where the system reports it in a file; else 0."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def server_memory(instances: Iterable[Instance]) -> ServerMemory:
    """All models of this server together."""
    present = [i for i in instances if i.reserved]
    found = [memory_of(i) for i in present]
    return ServerMemory(
        weights=sum(m.weights for m in found),
        kv_in_use=sum(m.kv_in_use for m in found),
        ceiling=sum(m.ceiling for m in found),
        held=sum(map(held_by, present)),
    )


class OtherServers:
    """The other servers that take memory from the same pool as this one."""

    def __init__(self, records: Callable[[], Sequence[ServerRecord]], pool: Pool) -> None:
        self._records = records
        self._pool = pool

    def found(self) -> list[ServerRecord]:
        return [record for record in self._records() if record.pool == self._pool]

    def held(self) -> int:
        """Bytes that they take now; what they may take at most is not set aside for them."""
        return sum(record.memory.held for record in self.found())

    def in_words(self) -> str:
        """A sentence about them; empty where there are none."""
        if not (found := self.found()):
            return ""
        each = "; ".join(
            f"{r.title} {format_bytes(r.memory.held)} (at most {format_bytes(r.memory.ceiling)})"
            for r in found
        )
        return f"Other millrace servers on this machine hold now: {each}."
