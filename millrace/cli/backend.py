"""`millrace backend`: a backend that LocalAI starts, or connects to, and drives over gRPC."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from millrace.config import EngineConfig, GroupConfig, LogFormat
from millrace.errors import SetupError


def backend(
    addr: Annotated[
        str, typer.Option(help="Address to listen on, as HOST:PORT.")
    ] = "127.0.0.1:50051",
    as_: Annotated[
        str,
        typer.Option(
            "--as",
            envvar="MILLRACE_BACKEND_AS",
            help="Which of LocalAI's backends this one stands for: mlx, mlx-vlm or mlx-distributed.",
        ),
    ] = "mlx",
    drain_timeout: Annotated[
        float,
        typer.Option(help="Seconds that running answers get to finish on SIGTERM and Free."),
    ] = 10.0,
    cache_disk: Annotated[
        str | None,
        typer.Option(
            help="Disk for the state of prompts, like 16G, or 0 for none; as for serve if not given."
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(help="Where it is kept on disk; in millrace's own folder if not given."),
    ] = None,
    worker: Annotated[
        bool,
        typer.Option("--worker", help="Be a further rank of a split model: wait for the first."),
    ] = False,
    backend_: Annotated[
        str | None,
        typer.Option(
            "--backend", envvar="MLX_DISTRIBUTED_BACKEND", help="How ranks talk: ring or jaccl."
        ),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(
            envvar="MLX_DISTRIBUTED_HOSTFILE", help="Where the ranks of split models are."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="This rank's place in the hostfile.")] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(help="Where JACCL's ranks meet, as IP:PORT; at the first if not given."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Serve one model at a time to LocalAI, over gRPC (docs/localai.md)."""
    import asyncio
    import logging
    import os

    from millrace import descriptors, logs
    from millrace.cli import rank_options
    from millrace.cli.values import one_of
    from millrace.cli.worker import wait

    parent = os.getppid()
    log_level = one_of("--log-level", log_level, ("debug", "info", "warning", "error"))
    form: LogFormat = one_of("--log-format", log_format, get_args(LogFormat))
    logs.setup(log_level, form)
    descriptors.raise_limit()
    descriptors.check("A backend")
    if worker:
        if hostfile is None or rank is None:
            raise SetupError("--worker needs --hostfile and --rank.")
        wait(hostfile, rank, backend=backend_, log_level=log_level)
        return
    if rank:
        raise SetupError(
            f"--rank {rank} is a worker's: add --worker. Rank 0 is what LocalAI calls."
        )
    group = _group(hostfile, backend_, coordinator)
    if drain_timeout < 0:
        raise SetupError("--drain-timeout cannot be negative.")
    try:
        from millrace.rpc.localai.server import serve
        from millrace.rpc.localai.settings import Name
    except ImportError as error:
        raise SetupError(
            f"gRPC is missing ({error.name}): pip install 'millrace-server[localai]'"
        ) from error
    name: Name = one_of("--as", as_, get_args(Name))
    base = EngineConfig(
        model="",
        name="",
        group=group,
        cache_disk=rank_options.disk(group, cache_disk, cache_dir),
        cache_dir=cache_dir,
        log_level=log_level,
        log_format=form,
    )

    def listening(port: int) -> None:
        logging.getLogger("millrace.rpc").info("listening on %s as %s", _with(addr, port), name)

    asyncio.run(
        serve(
            addr,
            name,
            base,
            parent=parent,
            token=os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", ""),
            drain=drain_timeout,
            on_listening=listening,
        )
    )


def _group(
    hostfile: str | None, backend: str | None, coordinator: str | None
) -> GroupConfig | None:
    """The ranks that models are split over, unless LoadModel names others."""
    import os

    from millrace.distributed.hostfile import read_hostfile

    if hostfile is None:
        if coordinator is not None:
            raise SetupError("--coordinator needs --hostfile.")
        return None
    secret = os.environ.get("MILLRACE_RANKS_SECRET", "")
    group = read_hostfile(hostfile, backend=backend, coordinator=coordinator, secret=secret)
    return group if len(group.hosts) > 1 else None


def _with(addr: str, port: int) -> str:
    """The address with the port that a 0 became."""
    return f"{addr.rpartition(':')[0]}:{port}"


def register(app: typer.Typer) -> None:
    app.command()(backend)
