"""Handing a request to its model, the same way for every protocol."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request as HttpRequest

from millrace.api.context import context_of
from millrace.api.keys import caller_of
from millrace.api.stripped import note
from millrace.serving.group import Group
from millrace.serving.model import Running, ServedModel
from millrace.serving.request import Request


def run(http: HttpRequest, model: ServedModel, request: Request) -> Running:
    """Must be closed, however it ends."""
    return _counted(http, model.run(_marked(http, request)))


def run_group(http: HttpRequest, model: ServedModel, requests: list[Request]) -> Group:
    """Must be closed, however it ends."""
    members = model.run_all([_marked(http, r) for r in requests])
    return Group([_counted(http, m) for m in members])


def _counted(http: HttpRequest, running: Running) -> Running:
    """What it costs is charged to its caller when it ends, where the server has limits."""
    charge: Callable[[int], None] | None = http.scope.get("state", {}).get("charge")
    if charge is not None:
        running.on_end(lambda usage: charge(usage.prompt + usage.completion))
    return running


def _marked(http: HttpRequest, request: Request) -> Request:
    """With what the server knows of the caller."""
    request.endpoint = http.scope["route"].path
    note(http.scope, request.stripped)
    if context_of(http).config.cache_isolation == "key":
        request.cache_salt = f"key:{caller_of(http)}\0{request.cache_salt}"
    return request
