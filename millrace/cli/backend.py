"""`millrace backend`: a backend that LocalAI starts, or connects to, and drives over gRPC."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from millrace.config import EngineConfig, LogFormat
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
        bool, typer.Option("--worker", help="Be a further rank of a split model: not there yet.")
    ] = False,
    backend_: Annotated[
        str | None, typer.Option("--backend", help="How ranks talk: not there yet.")
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option(help="The ranks of a split model: not there yet.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="This rank's number: not there yet.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Where the first rank is: not there yet.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Serve one model at a time to LocalAI, over gRPC (docs/localai.md)."""
    import asyncio
    import logging
    import os

    from millrace import logs
    from millrace.cli.values import disk_of, one_of

    parent = os.getppid()
    log_level = one_of("--log-level", log_level, ("debug", "info", "warning", "error"))
    form: LogFormat = one_of("--log-format", log_format, get_args(LogFormat))
    logs.setup(log_level, form)
    if worker or any(v is not None for v in (backend_, hostfile, rank, coordinator)):
        raise SetupError(
            "Models are not split over machines yet. Leave --worker, --backend, --hostfile, --rank "
            "and --coordinator out to serve them from this one."
        )
    if drain_timeout < 0:
        raise SetupError("--drain-timeout cannot be negative.")
    try:
        from millrace.rpc.localai.server import serve
        from millrace.rpc.localai.settings import Name
    except ImportError as error:
        raise SetupError(
            f"gRPC is missing ({error.name}): pip install 'millrace[localai]'"
        ) from error
    name: Name = one_of("--as", as_, get_args(Name))
    base = EngineConfig(
        model="",
        name="",
        cache_disk=disk_of("--cache-disk", cache_disk, cache_dir),
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


def _with(addr: str, port: int) -> str:
    """The address with the port that a 0 became."""
    return f"{addr.rpartition(':')[0]}:{port}"


def register(app: typer.Typer) -> None:
    app.command()(backend)
