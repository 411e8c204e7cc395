"""The table of roles is held to the routes that there are: none is forgotten, none is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from millrace.api.app import create_app
from millrace.api.context import Context
from millrace.api.openapi.document import build
from millrace.api.openapi.routing import flat
from millrace.config import ApiKey, EngineConfig, ServeConfig
from millrace.serving import access
from millrace.serving.metrics import Metrics

USE, ADMIN = ApiKey(secret="sk-use"), ApiKey(secret="sk-admin", role="admin")


def _app(*keys: ApiKey) -> FastAPI:
    config = ServeConfig(engine=EngineConfig(model="", name=""), api_keys=keys)
    return create_app(Context(MagicMock(), config, Metrics()))


def _routes(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    plain = [r for r in routes if isinstance(r, Route)]
    for route in (*plain, *flat(routes)):
        for method in route.methods or ():
            yield method, route.path


def test_every_route_is_classified_and_no_other() -> None:
    app = _app()
    assert all(isinstance(r, Route) or list(flat([r])) for r in app.routes), "all kinds are walked"
    assert set(_routes(list(app.routes))) == set(access.HTTP)


def _ask(app: FastAPI, method: str, path: str, key: str | None) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://mill") as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


ENDLESS = {"/v1/status/stream", "/v1/logs/stream"}
CASES = sorted((m, p, a) for (m, p), a in access.HTTP.items())


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return _app(USE, ADMIN)


@pytest.mark.parametrize(("method", "path", "needed"), CASES)
def test_each_route_wants_the_role_of_the_table(
    app: FastAPI, method: str, path: str, needed: str
) -> None:
    real = path.replace("{name:path}", "m").replace("{", "").replace("}", "")
    refused = _ask(app, method, real, None)
    assert (refused.status_code == 401) == (needed != "open")
    if path in ENDLESS and needed == "use":
        return
    assert (_ask(app, method, real, "sk-use").status_code == 403) == (needed == "admin")
    if path not in ENDLESS:
        assert _ask(app, method, real, "sk-admin").status_code not in (401, 403)


def _variants(path: str) -> Iterator[str]:
    """Other spellings of a path, some of which a router may take for the same."""
    yield from (f"{path}/", f"{path}//", f"/{path}", f"/v1{path}", f"/.{path}", f"/v1/..{path}")
    yield from (path.removeprefix("/v1"), path.upper(), f"{path}?x=1", f"{path};x")
    yield from (f"{path}%2f", f"{path}%00", f"{path[:-1]}%{ord(path[-1]):02x}")


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, a in CASES if a == "admin"])
def test_no_spelling_of_an_administrators_route_is_open_to_others(
    app: FastAPI, method: str, path: str
) -> None:
    real = path.replace("{name:path}", "m").replace("{", "").replace("}", "")
    for spelled in _variants(real):
        for key in (None, "wrong"):
            assert _ask(app, method, f"http://mill{spelled}", key).status_code == 401, spelled
        answer = _ask(app, method, f"http://mill{spelled}", "sk-use")
        while answer.status_code == 307:
            assert answer.headers["location"].startswith(f"http://mill{real}")
            answer = _ask(app, method, answer.headers["location"], "sk-use")
        assert answer.status_code in (403, 404, 405), (spelled, answer.text)


def test_a_route_that_is_not_in_the_table_is_for_administrators() -> None:
    app = _app(USE, ADMIN)

    @app.get("/forgotten")
    async def forgotten() -> dict[str, Any]:
        return {}

    assert _ask(app, "GET", "/forgotten", "sk-use").status_code == 403
    assert _ask(app, "GET", "/forgotten", "sk-admin").status_code == 200


def test_a_server_whose_keys_are_all_for_use_says_that_nobody_may() -> None:
    app = _app(USE)
    message = _ask(app, "POST", "/flush_cache", "sk-use").json()["error"]["message"]
    for word in ("No key of this server has it", "millrace command", "--admin-key", "NAME[admin]:"):
        assert word in message


def test_the_document_names_the_role() -> None:
    paths = build(flat(_app().routes), keyed=True)["paths"]
    for (method, path), needed in access.HTTP.items():
        operation = paths.get(path.replace(":path", ""), {}).get(method.lower())
        if operation is not None:
            assert ("admin" in operation.get("description", "")) == (needed == "admin")
            assert needed != "admin" or "403" in operation["responses"]


def test_without_keys_everything_is_allowed() -> None:
    app = _app()
    for (method, path), needed in access.HTTP.items():
        if needed == "admin" and path not in ENDLESS:
            real = path.replace("{name:path}", "m").replace("{", "").replace("}", "")
            assert _ask(app, method, real, None).status_code not in (401, 403), path
