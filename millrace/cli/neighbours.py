"""A server among others on the same machine: its record, and what its start says of them."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.errors import SetupError
from millrace.sizes import format_bytes

if TYPE_CHECKING:
    from millrace.config import ServeConfig
    from millrace.servers import Pool, Registration
    from millrace.serving.memory import OtherServers
    from millrace.serving.registry import Registry

STARTED_BY = "MILLRACE_STARTED_BY"
"""The command that starts a server for itself, as it tells the server."""


def register(config: ServeConfig, listener: socket.socket, models: Sequence[str]) -> Registration:
    """Publish this server's record, under a name that no other has."""
    from millrace.servers import Registration, ServerRecord, running, this_machine

    name = config.server_name or ""
    if name and (other := next((r for r in running() if r.name == name), None)) is not None:
        raise SetupError(
            f"--server-name {name} is taken: that is the server at {other.url}, process {other.pid}. "
            "Choose another name."
        )
    host, port = listener.getsockname()[:2]
    registration = Registration(
        ServerRecord(
            host=host,
            port=port,
            pid=os.getpid(),
            name=name,
            machine=this_machine(),
            pool=pool(),
            started=time.time(),
            private=os.environ.get(STARTED_BY, ""),
            models=tuple(models),
        )
    )
    registration.open()
    return registration


def pool() -> Pool:
    from millrace.models import blas

    return "cuda" if blas.mlx_backend() == "cuda" else "host"


def warn(others: OtherServers, whole: int | None, chosen: int | None) -> None:
    """Log what the others hold, and whether --memory asks for more than they leave."""
    log = logging.getLogger("millrace.serving")
    if not (found := others.in_words()) or whole is None:
        return
    left = max(0, whole - others.held())
    if chosen is None:
        log.info("%s This server's models may take %s", found, format_bytes(left))
    elif chosen > left:
        log.warning(
            "--memory is %s, and %s are left beside other servers. %s",
            format_bytes(chosen),
            format_bytes(left),
            found,
        )


def lines(others: OtherServers, registry: Registry, whole: int | None) -> list[str]:
    """For the banner: the others, what is left for this server, and whether all can take their most."""
    if not (found := others.found()):
        return []
    said = [others.in_words()]
    if registry.limit is not None:
        said[0] += f" This server's models may take {format_bytes(registry.limit)}."
    most = sum(r.memory.ceiling for r in found) + registry.reserved
    if whole is not None and most > whole:
        said.append(
            f"Together the servers may come to take {format_bytes(most)}, and there are "
            f"{format_bytes(whole)} for models: give each its part with --memory."
        )
    return said
