"""The routes of an application, whichever way the framework nests them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route


def every(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """Newer releases of FastAPI keep an included router as one route of its parent."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from every(router.routes)


def flat(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """The routes of the API, without the page's files."""
    return (route for route in every(routes) if isinstance(route, APIRoute))
