"""Under which names the server answers: no site that has its name point here passes for its page."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from millrace.api.app import create_app
from millrace.api.context import Context
from millrace.api.hosts import is_known, names_of
from millrace.config import ApiKey, EngineConfig, ServeConfig
from millrace.errors import SetupError
from millrace.serving.catalogue import Catalogue
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.registry import Registry

KEYS = (ApiKey(secret="sk-hosts"),)


def _config(**options: Any) -> ServeConfig:
    return ServeConfig(engine=EngineConfig(model="none", name="none"), **options)


def _app(**options: Any) -> Any:
    metrics = Metrics()
    launcher = ModelLauncher(Workplace(), metrics, idle=1.0, max_queue=1)
    return create_app(
        Context(Registry(Catalogue([]), launcher, metrics), _config(**options), metrics)
    )


@pytest.fixture(scope="module")
def plain() -> Any:
    return _app()


def _ask(app: Any, path: str, host: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers | {"host": host})

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/models"),
        ("GET", "/v1/status"),
        ("GET", "/v1/logs/stream"),
        ("GET", "/metrics"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/api/pull"),
        ("DELETE", "/v1/cache"),
        ("OPTIONS", "/v1/models"),
    ],
)
def test_a_site_that_points_its_name_here_gets_nothing(plain: Any, method: str, path: str) -> None:
    host = "attacker.example:8000"
    refused = _ask(plain, path, host, method, origin=f"http://{host}")
    assert refused.status_code == 403
    told = json.dumps(refused.json()["error"])
    assert "attacker.example:8000" in told and "--allowed-host" in told


def test_each_protocol_says_so_in_its_own_shape(plain: Any) -> None:
    anthropic = _ask(plain, "/v1/messages", "evil.example", "POST").json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "permission_error")
    openai = _ask(plain, "/v1/models", "evil.example").json()["error"]
    assert (openai["type"], openai["code"]) == ("permission_error", "not_allowed")
    assert isinstance(_ask(plain, "/api/tags", "evil.example").json()["error"], str)


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "host.docker.internal"]
)
def test_who_asks_under_this_machines_names_is_answered(plain: Any, host: str) -> None:
    assert _ask(plain, "/v1/models", host).status_code == 200


def test_a_name_that_was_allowed_is_answered_and_its_page_is_the_servers_own() -> None:
    app = _app(allowed_hosts=("llm.example",))
    assert _ask(app, "/v1/models", "LLM.example").status_code == 200
    own = _ask(app, "/v1/cache", "llm.example", "DELETE", origin="https://llm.example")
    assert own.status_code != 403
    assert _ask(app, "/v1/models", "attacker.example").status_code == 403


def test_where_a_key_is_asked_for_the_name_does_not_matter() -> None:
    app = _app(api_keys=KEYS)
    assert _ask(app, "/v1/models", "llm.example").status_code == 401
    known = _ask(app, "/v1/models", "llm.example", authorization="Bearer sk-hosts")
    assert known.status_code == 200


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"host": "127.0.0.2"}, {"127.0.0.2"}),
        ({"host": "::1"}, {"::1"}),
        ({"host": "0.0.0.0", "allowed_hosts": ("A.example",)}, {"0.0.0.0", "a.example"}),
        ({"api_keys": KEYS, "allowed_hosts": ("a.example",)}, {"127.0.0.1", "a.example"}),
        (
            {"cors_origins": ("https://Friend.example:444", "app://shop.example", "http://[")},
            {"127.0.0.1", "friend.example"},
        ),
    ],
)
def test_names_matter_where_only_this_machine_gets_in_or_where_some_were_given(
    options: dict[str, Any], more: set[str]
) -> None:
    names = names_of(_config(**options))
    assert names is not None and names >= {"localhost"}
    assert names - (names_of(_config(host="localhost")) or set()) == more


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"},
        {"host": "llm.example"},
        {"api_keys": KEYS},
        {"cors_origins": ("*",)},
        {"allowed_hosts": ("*", "a.example")},
    ],
)
def test_elsewhere_every_name_is_answered(options: dict[str, Any]) -> None:
    assert names_of(_config(**options)) is None


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LOCALHOST.:8000", True),
        ("app.localhost:3000", True),
        ("10.1.2.3:80", True),
        ("0.0.0.0:8000", True),
        ("[::1]", True),
        ("[::FFFF:127.0.0.1]:8000", True),
        ("127.0.0.1:", True),
        ("a.example", True),
        ("deep.b.example:1", True),
        ("very.deep.b.example", True),
        ("b.example", False),
        ("xb.example", False),
        ("a.example.evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.internal", False),
        ("evil.example@localhost", False),
        ("localhost@evil.example", False),
        ("localhost:80:80", False),
        ("mill:8000", True),
        ("localhost:port", False),
        ("localhost:99999", False),
        ("localhost/evil", False),
        ("localhost#evil", False),
        ("local\thost", False),
        (" localhost", False),
        ("[::1].evil.example", False),
        ("[::1]evil.example:80", False),
        ("[::1]@evil.example", False),
        ("[::1]]", False),
        ("[[::1]]", False),
        ("[127.0.0.1]", False),
        ("[fe80::1%25en0]:8000", False),
        ("[::1%evil.example]", False),
        ("[::1%25.evil.example]:80", False),
        ("[v1.evil]", False),
        ("localhost:80@evil.example", False),
        ("localhost:@evil.example", False),
        ("user:pass@localhost", False),
        ("localhost:+80", False),
        ("localhost:8_0", False),
        ("localhost:\u0661", False),
        ("localhost..", False),
        ("evil.example.", False),
        ("LOCALHOST.EVIL.EXAMPLE", False),
        ("localhost, evil.example", False),
        ("localhost,evil.example", False),
        ("localhost evil.example", False),
        ("localhost ", False),
        ("localhost\\.evil.example", False),
        ("localhost?.evil.example", False),
        ("127.1.evil.example", False),
        ("localhost%00.evil.example", False),
        ("local%68ost", False),
        ("[::1", False),
        ("::1", False),
        ("[localhost]", False),
        (":8000", False),
        ("*", False),
        ("*.b.example", False),
        (".", False),
        ("loc\xe4lhost", False),
        ("\u2100.example", False),
        ("a" * 100_000, False),
        ("." * 100_000, False),
    ],
)
def test_a_name_is_known_by_all_of_it(host: str, known: bool) -> None:
    assert is_known(host, {"localhost", "*.localhost", "a.example", "*.b.example"}) is known


@pytest.mark.parametrize(
    "name",
    ["https://a.example", "a.example:80", "a b", "", "*.", "*a", "a/b", "[::1]", "a\n", "a."],
)
def test_what_is_no_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(SetupError, match="--allowed-host"):
        _config(allowed_hosts=(name,))
