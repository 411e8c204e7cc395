"""Ports for processes that are about to be started, and that listen a moment later."""

from __future__ import annotations

import contextlib
import random
import socket

_LOWEST, _END = 26_000, 32_768
"""Below what Linux and macOS give to connections: one that is free is not taken by somebody's request
before it is listened at."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody has now."""
    found: list[int] = []
    # Drawn from the system: two processes that were seeded alike would choose alike.
    for port in random.SystemRandom().sample(range(_LOWEST, _END), _END - _LOWEST):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no port is free")


def free_port() -> int:
    return free_ports(1)[0]
