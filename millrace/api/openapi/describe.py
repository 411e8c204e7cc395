"""What a route says about itself, next to the route: its body, its answers and its statuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

READS = (400, 413, 415, 429)
"""What may come of a body."""
RUNS = (400, 404, 413, 415, 429, 499, 500, 503, 504, 507)
"""What may come of a request that a model answers."""
SSE = "text/event-stream"


@dataclass(frozen=True)
class RouteDescription:
    tag: str
    summary: str
    body: Any = None
    """The type of the request's JSON."""
    answer: Any = None
    """The type of the JSON of a 200; None for an object that is not described further."""
    media: str = "application/json"
    stream: str | None = None
    """The media type of a streamed answer."""
    event: Any = None
    """The type of a streamed answer's pieces."""
    statuses: tuple[int, ...] = ()
    query: Any = None
    """A struct whose fields are query parameters."""
    needs_body: bool = True
    alike: tuple[int, ...] = ()
    """Further statuses whose JSON is that of a 200, not an error's."""

    @property
    def runs(self) -> bool:
        return 499 in self.statuses


_DESCRIBED: dict[Callable[..., Any], RouteDescription] = {}


def describe(
    tag: str,
    summary: str,
    *,
    body: Any = None,
    answer: Any = None,
    media: str = "application/json",
    stream: str | None = None,
    event: Any = None,
    statuses: Iterable[int] = (),
    query: Any = None,
    needs_body: bool = True,
    alike: Iterable[int] = (),
) -> Callable[[Endpoint], Endpoint]:
    """Describe the endpoint below; stands between it and its route."""
    given = RouteDescription(
        tag=tag,
        summary=summary,
        body=body,
        answer=answer,
        media=media,
        stream=stream,
        event=event,
        statuses=tuple(statuses),
        query=query,
        needs_body=needs_body,
        alike=tuple(alike),
    )

    def note(endpoint: Endpoint) -> Endpoint:
        _DESCRIBED[endpoint] = given
        return endpoint

    return note


def description_of(endpoint: Callable[..., Any]) -> RouteDescription | None:
    return _DESCRIBED.get(endpoint)
