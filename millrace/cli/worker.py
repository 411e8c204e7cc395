"""`millrace worker`: a machine that waits for its part of a split model."""

from __future__ import annotations

from typing import Annotated

import typer


def worker(
    rank: Annotated[
        int | None,
        typer.Option(help="Its place in the hostfile, from 1 on; MLX_RANK if not given."),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(help="The same file that the server has; MLX_HOSTFILE if not given."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="How ranks talk, if the file does not say: ring, jaccl or nccl."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on, if this machine has another than the hostfile says."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Where the model is here, if it lies elsewhere than on the server."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Allow a model folder to bring Python code of its own.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Wait for a server that has a part of a model for this machine (docs/distributed.md)."""
    import os

    from millrace.cli.values import one_of
    from millrace.distributed.environment import hostfile_in
    from millrace.errors import SetupError

    found = hostfile_in(os.environ)
    rank = found[1] if rank is None and found is not None else rank
    hostfile = found[0] if hostfile is None and found is not None else hostfile
    if rank is None or hostfile is None:
        raise SetupError("A worker needs --rank and --hostfile, or MLX_RANK and MLX_HOSTFILE.")
    wait(
        hostfile,
        rank,
        backend=backend,
        listen=listen,
        model=model,
        trust_remote_code=trust_remote_code,
        log_level=one_of("--log-level", log_level, ("debug", "info", "warning", "error")),
    )


def wait(
    hostfile: str,
    rank: int,
    *,
    backend: str | None = None,
    listen: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    log_level: str = "info",
) -> None:
    """Be a worker until a signal comes."""
    import asyncio
    import contextlib
    import logging
    import os
    import signal

    from millrace import descriptors, logs
    from millrace.distributed.hostfile import peers_of, read_hostfile
    from millrace.errors import SetupError
    from millrace.serving.ranks.worker import RankWorker

    logs.setup(log_level, "text")
    descriptors.raise_limit()
    descriptors.check("A worker")
    secret = os.environ.get("MILLRACE_RANKS_SECRET", "")
    group = read_hostfile(hostfile, backend=backend, secret=secret)
    if not 0 < rank < len(group.hosts):
        last = len(group.hosts) - 1
        workers = f"the workers 1 to {last}" if last else "no workers"
        raise SetupError(
            f"--rank {rank}: the hostfile has {workers}; rank 0 is the server, `millrace serve`."
        )
    host = group.hosts[rank]
    log = logging.getLogger("millrace.ranks")
    if not secret:
        log.warning(
            "without MILLRACE_RANKS_SECRET, whoever has the hostfile and one of its addresses can use this "
            "machine: let ranks have a network of their own"
        )

    async def run() -> None:
        waiting = RankWorker(
            rank,
            group.secret,
            peers=peers_of(group),
            model=model,
            trust_remote_code=trust_remote_code,
        )
        task = asyncio.create_task(
            waiting.serve(
                listen or host.address,
                host.control,
                lambda port: log.info("rank %d waits for a server on port %d", rank, port),
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())


def register(app: typer.Typer) -> None:
    app.command()(worker)
