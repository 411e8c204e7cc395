"""Options for models that are split over ranks, and the group that they describe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from millrace.config import GroupConfig

Ranks = Annotated[
    int | None,
    typer.Option(
        help="Split the model over so many processes on this machine (docs/distributed.md)."
    ),
]
Hostfile = Annotated[
    str | None,
    typer.Option(
        help="Split it over the machines that this file names, in mlx.launch's form; the first is this "
        "one, on the others `millrace worker` waits or is started over ssh."
    ),
]
Split = Annotated[
    str,
    typer.Option(
        help="tensor: every layer over all ranks; pipeline: whole layers; auto: what it can."
    ),
]
Backend = Annotated[
    str | None, typer.Option(help="How ranks talk: ring (TCP), jaccl (Thunderbolt RDMA) or nccl.")
]


def group_of(
    ranks: int | None, hostfile: str | None, parallel: str, backend: str | None
) -> GroupConfig | None:
    """The ranks that models are split over; None where nobody asks for any."""
    from millrace.cli.values import one_of
    from millrace.config import GroupConfig, Parallel
    from millrace.distributed.environment import hostfile_in
    from millrace.distributed.hostfile import MOST_RANKS, read_hostfile
    from millrace.errors import SetupError

    how: Parallel = one_of("--parallel", parallel, get_args(Parallel))
    if ranks is None and hostfile is None and (launched := hostfile_in(os.environ)) is not None:
        hostfile = launched[0]
    if ranks is not None and hostfile is not None:
        raise SetupError("--ranks is for this machine and --hostfile for several; choose one.")
    if hostfile is not None:
        group = read_hostfile(
            hostfile,
            backend=backend,
            parallel=how,
            secret=os.environ.get("MILLRACE_RANKS_SECRET", ""),
        )
        return group if len(group.hosts) > 1 else None
    if ranks is None:
        if backend is not None or how != "auto":
            raise SetupError("--parallel and --distributed-backend need --ranks or --hostfile.")
        return None
    if not 1 <= ranks <= MOST_RANKS:
        raise SetupError(f"--ranks takes 1 to {MOST_RANKS}, not {ranks}.")
    if backend not in (None, "ring"):
        raise SetupError(
            "--ranks starts processes that talk over a ring; use --hostfile for others."
        )
    from millrace.serving.ranks.local import hosts_of

    if ranks == 1:
        return None
    return GroupConfig(hosts=hosts_of(ranks), parallel=how, started=True)


def launched_as_worker(hostfile: str | None) -> bool:
    """Whether mlx.launch started this process as a rank beside the first; then it is one until it ends."""
    from millrace.distributed.environment import hostfile_in

    found = hostfile_in(os.environ)
    if found is None or found[1] == 0:
        return False
    from millrace.cli.worker import wait

    wait(hostfile or found[0], found[1], backend=os.environ.get("MILLRACE_DISTRIBUTED_BACKEND"))
    return True


def disk(group: GroupConfig | None, size: str | None, folder: str | None) -> int:
    """Bytes of the prefix cache's disk tier, of each rank: those of one machine share its disk."""
    from millrace.cli.values import disk_of

    whole = disk_of("--cache-disk", size, folder)
    return whole // len(group.hosts) if group is not None and group.started else whole
