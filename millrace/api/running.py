"""Handing an HTTP request to its model, with what the server knows of the caller."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from millrace.api.context import caller_of, context_of
from millrace.api.stripped_header import note
from millrace.caller import current_caller
from millrace.serving import dispatch
from millrace.serving.dispatch import Origin
from millrace.serving.group import Group
from millrace.serving.model import ServedModel
from millrace.serving.request import Request
from millrace.serving.running import Running


def run(http: HttpRequest, model: ServedModel, request: Request) -> Running:
    """Must be closed, however it ends."""
    note(http.scope, request.stripped)
    return dispatch.run(model, request, origin_of(http))


async def run_group(http: HttpRequest, model: ServedModel, requests: list[Request]) -> Group:
    """Must be closed, however it ends."""
    for request in requests:
        note(http.scope, request.stripped)
    return await dispatch.run_group(model, requests, origin_of(http))


def origin_of(http: HttpRequest) -> Origin:
    return Origin(
        endpoint=http.scope["route"].path,
        caller=caller_of(http),
        quota=context_of(http).quotas.of(current_caller.get()),
        isolated=context_of(http).config.cache_isolation == "key",
    )
