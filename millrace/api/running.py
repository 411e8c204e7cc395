"""Handing a request to its model, the same way for every protocol."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from millrace.serving.group import Group
from millrace.serving.model import Running, ServedModel
from millrace.serving.request import Request


def run(http: HttpRequest, model: ServedModel, request: Request) -> Running:
    """Must be closed, however it ends."""
    return model.run(_marked(http, request))


def run_group(http: HttpRequest, model: ServedModel, requests: list[Request]) -> Group:
    """Must be closed, however it ends."""
    return Group(model, [_marked(http, r) for r in requests])


def _marked(http: HttpRequest, request: Request) -> Request:
    """With what the server knows of the caller."""
    request.endpoint = http.scope["route"].path
    return request
