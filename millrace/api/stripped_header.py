"""The header that says how many volatile lines were left out of a prompt, on every protocol."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-millrace-stripped"


def note(scope: Scope, lines: int) -> None:
    """Have the response to this request say so."""
    if lines and "stripped" in (state := scope.get("state", {})):
        state["stripped"] += lines


class StrippedHeader:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["stripped"] = 0

        async def reporting(message: Message) -> None:
            if message["type"] == "http.response.start" and (lines := state["stripped"]):
                MutableHeaders(scope=message)[HEADER] = f"{lines} line{'s' * (lines > 1)}"
            await send(message)

        await self._app(scope, receive, reporting)
