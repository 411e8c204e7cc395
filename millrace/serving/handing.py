"""Handing a request to its model, the same way for every protocol and transport.

What a request costs is charged to its caller when it ends, and where callers are kept apart, each
has cached state of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millrace.serving.group import Group
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.serving.running import Running


@dataclass(frozen=True)
class Origin:
    """Where a request comes from, as far as a front knows it."""

    endpoint: str
    """The route or method, for the metrics."""
    caller: str = ""
    """The id of the caller's key; empty on a server without keys."""
    charge: Callable[[int], None] | None = None
    """Receives what the request has cost in tokens; None where nothing is limited."""
    isolated: bool = False
    """Whether cached state is shared with nobody else."""


def run(model: ServedModel, request: Request, origin: Origin) -> Running:
    """Must be closed, however it ends."""
    return _counted(model.run(_marked(request, origin)), origin)


async def run_group(model: ServedModel, requests: list[Request], origin: Origin) -> Group:
    """Must be closed, however it ends."""
    members = await model.run_all([_marked(r, origin) for r in requests])
    return Group([_counted(m, origin) for m in members])


def _counted(running: Running, origin: Origin) -> Running:
    charge = origin.charge
    if charge is not None:
        running.on_end(lambda usage: charge(usage.prompt + usage.completion))
    return running


def _marked(request: Request, origin: Origin) -> Request:
    request.endpoint = origin.endpoint
    request.caller = origin.caller
    if origin.isolated:
        request.cache_salt = f"key:{origin.caller}\0{request.cache_salt}"
    return request
