"""A model's group of ranks, over all starts of it: where its members are, and how each of them is.

A start of the group is a `GroupConnection`, which stands where the connection to a single engine would: it
is up when all ranks are, and gone as soon as one of them is.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from millrace.config import EngineConfig, GroupConfig, RankHost, RankSeat
from millrace.errors import EngineUnavailable, MillraceError
from millrace.ports import free_ports
from millrace.serving.ranks.local import StartedWorkers
from millrace.serving.ranks.member import Member

log = logging.getLogger("millrace.ranks")

ABSENT_SECONDS = 20.0
"""How long requests wait for a rank that cannot be reached, before they are told that it cannot."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank is."""

    rank: int
    address: str
    state: str
    stage: str
    pid: int | None
    weight_bytes: int
    peak_bytes: int
    turns: int
    checks: int
    """How often its state was compared with the first rank's, and found the same."""
    error: str | None


class RankGroup:
    def __init__(self, config: EngineConfig) -> None:
        assert config.group is not None
        self.config: GroupConfig = config.group
        if self.config.started and not self.config.secret:
            self.config = msgspec.structs.replace(self.config, secret=secrets.token_hex(16))
        self.workers = StartedWorkers(
            self.config, trust_remote_code=config.trust_remote_code, log_level=config.log_level
        )
        self.members = [
            Member(rank, (host.address, host.control), self.config.secret)
            for rank, host in enumerate(self.config.hosts)
            if rank
        ]
        cores = os.cpu_count() or 1
        if self.config.started and self.config.backend == "ring" and self.size > cores:
            log.warning(
                "%d ranks on %d cores: one that waits for another keeps a core busy, so they hold each "
                "other up",
                *(self.size, cores),
            )
        self.lost_since: float | None = time.monotonic()
        self.on_absent: Callable[[MillraceError], None] = lambda error: None
        """Hears, again and again, why requests cannot be served for a while."""

    @property
    def size(self) -> int:
        return len(self.config.hosts)

    def absent(self, why: str) -> None:
        """A rank cannot be had; after some time those who wait are told."""
        if self.lost_since is not None and time.monotonic() - self.lost_since > ABSENT_SECONDS:
            self.on_absent(EngineUnavailable(f"The model's ranks are not all there: {why}."))

    def seats(self, config: EngineConfig) -> list[EngineConfig]:
        """What each rank is told at a start."""
        group, here = self.config, None
        if group.started:
            ports = free_ports(self.size + 1)
            hosts = tuple(
                RankHost(address=h.address, port=port, control=0)
                for h, port in zip(group.hosts, ports, strict=False)
            )
            group = msgspec.structs.replace(group, hosts=hosts)
            here = (hosts[0].address, ports[-1])
        first = group.hosts[0]
        turns = here or (first.address, first.control)
        secret = secrets.token_hex(16)
        addresses = [h.address for h in group.hosts]
        return [
            msgspec.structs.replace(
                config,
                group=msgspec.structs.replace(group, secret=""),
                seat=RankSeat(
                    rank=rank,
                    turns=turns,
                    secret=secret,
                    alone=addresses.count(addresses[rank]) == 1,
                ),
            )
            for rank in range(self.size)
        ]

    def status(self, first: RankStatus) -> list[RankStatus]:
        """Of all ranks; how the first one is, its engine's client knows."""
        return [first, *(_status(member) for member in self.members)]

    async def end(self) -> None:
        """No more of it will be started: workers that are the server's own end."""
        for member in self.members:
            member.close()
        await self.workers.end()


def _status(member: Member) -> RankStatus:
    loss, beat, state = member.loss(), member.beat, member.state
    return RankStatus(
        rank=member.rank,
        address=f"{member.address[0]}:{member.address[1]}",
        state=state,
        stage="" if state in ("unreachable", "lost") else beat.stage,
        pid=beat.pid if state != "unreachable" else None,
        weight_bytes=beat.weight_bytes,
        peak_bytes=beat.peak_bytes,
        turns=beat.turns,
        checks=beat.checks,
        error=str(loss) if loss is not None else None,
    )


def resident_peak(pid: int | None) -> int:
    """The most bytes of memory that a process has held, where the system tells it in a file; else 0."""
    try:
        told = Path(f"/proc/{pid}/status").read_text()
        return int(told.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
