"""Roles of API keys: what a key that may only use the models is refused and not shown, over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from click.testing import Result
from conftest import Server, until
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.errors import RoleNeeded

LONG = {"prompt": "Once", "max_tokens": 7000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}
GRANT = ("--admin-key", "MILLRACE_ADMIN_KEY", "NAME[admin]:KEY", "'admin'", "'use'")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roles")


@pytest.fixture(scope="module")
def served(home: Path, default_model: Path) -> Iterator[Server]:
    """A server with three keys that serves one of the two models in its store."""
    folder = tiny_folder.make(home / "models" / "served", default_model)
    shutil.copytree(folder, home / "models" / "spare")
    keys = home / "keys"
    keys.write_text("ann:sk-ann\nbob:sk:bob\nroot[admin]:sk-root\n")
    env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    running = Server(str(folder), "--api-key-file", str(keys), env=env).wait_ready()
    yield running
    running.stop()


def _key(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def _ask(
    server: Server, key: str, method: str, path: str, body: Any = None, **headers: str
) -> httpx.Response:
    return server.http.request(method, path, json=body, headers=_key(key) | headers)


@contextmanager
def _running(server: Server, key: str, id: str) -> Iterator[Iterator[str]]:
    """A request under way, whose first event has come."""
    headers = _key(key) | {"x-request-id": id}
    with server.http.stream("POST", "/v1/completions", json=LONG, headers=headers) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        try:
            yield lines
        finally:
            _ask(server, "sk-root", "DELETE", f"/v1/requests/{id}")


REFUSED = [
    ("POST", "/v1/models/served/load", {}),
    ("POST", "/v1/models/served/unload", {}),
    ("POST", "/v1/models/served/pin", {}),
    ("POST", "/models/load", {"model": "served"}),
    ("POST", "/models/unload", {"model": "served"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/tmp"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("DELETE", "/v1/cache", None),
    ("GET", "/flush_cache", None),
    ("POST", "/flush_cache", {}),
    ("GET", "/v1/logs/stream", None),
    ("DELETE", "/api/delete", {"model": "served"}),
    ("DELETE", "/api/delete", {"model": "spare"}),
    ("POST", "/api/pull", {"model": "org/name"}),
    ("GET", "/v1/hub/search?q=qwen", None),
    ("POST", "/api/create", {"model": "mine", "from": "served"}),
    ("POST", "/api/copy", {"source": "served", "destination": "mine"}),
    ("POST", "/api/push", {"model": "served"}),
    ("POST", "/api/generate", {"model": "served", "keep_alive": 0}),
    ("POST", "/api/chat", {"model": "served", "messages": [], "keep_alive": "0s"}),
]


@pytest.mark.parametrize(("method", "path", "body"), REFUSED)
def test_administration_is_refused_to_a_key_that_may_use(
    served: Server, home: Path, method: str, path: str, body: Any
) -> None:
    refused = _ask(served, "sk-ann", method, path, body)
    assert refused.status_code == 403
    error = refused.json()["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str)
        message = error
    else:
        assert (error["type"], error["code"]) == ("permission_error", "insufficient_permissions")
        message = error["message"]
    assert all(word in message for word in GRANT), message
    assert "No key of this server" not in message
    for name in ("served", "spare"):
        assert (home / "models" / name / "config.json").is_file()
    assert _ask(served, "sk-ann", "GET", "/v1/models/served").json()["state"] == "loaded"


def test_an_administrator_may(served: Server) -> None:
    for method, path, body in (
        ("DELETE", "/v1/cache", None),
        ("POST", "/flush_cache", {}),
        ("POST", "/v1/models/served/pin", {"pin": False}),
        ("POST", "/v1/models/served/load", {}),
    ):
        assert _ask(served, "sk-root", method, path, body).status_code == 200, path
    with served.http.stream("GET", "/v1/logs/stream", headers=_key("sk-root")) as response:
        assert response.status_code == 200


def test_a_key_is_told_its_role(served: Server) -> None:
    ann = _ask(served, "sk-ann", "GET", "/v1/key").json()
    assert (ann["required"], ann["role"], ann["name"]) == (True, "use", "ann")
    assert all(word in ann["reason"] for word in GRANT)
    root = _ask(served, "sk-root", "GET", "/v1/key").json()
    limits = root.pop("limits")
    assert root == {"required": True, "role": "admin", "name": "root", "reason": None}
    assert set(limits.values()) == {None}


def _seen(server: Server, key: str) -> list[set[str]]:
    """The ids of requests that each way of looking shows."""
    status = _ask(server, key, "GET", "/v1/status").json()
    requests = _ask(server, key, "GET", "/v1/requests").json()
    found = [
        {r["id"] for m in status["models"] for r in m["requests"]},
        {r["id"] for r in requests["running"]},
    ]
    with server.http.stream("GET", "/v1/status/stream", headers=_key(key)) as response:
        data = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
        next(data)  # the history
        for _ in range(2):  # the first snapshot, and one that is made for all who listen
            snapshot = json.loads(next(data))
            found.append({r["id"] for m in snapshot["models"] for r in m["requests"]})
    return found


def test_requests_are_shown_to_their_own_key_and_to_administrators(served: Server) -> None:
    with _running(served, "sk-ann", "of-ann"), _running(served, "sk:bob", "of-bob"):
        assert all(ids == {"of-ann"} for ids in _seen(served, "sk-ann"))
        assert all(ids == {"of-bob"} for ids in _seen(served, "sk:bob"))
        assert all(ids == {"of-ann", "of-bob"} for ids in _seen(served, "sk-root"))
        running = _ask(served, "sk-root", "GET", "/v1/requests").json()["running"]
        assert {r["id"]: r["key"] for r in running} == {"of-ann": "ann", "of-bob": "bob"}
    ended = "/v1/requests?limit=500"
    assert until(lambda: "of-bob" in _ask(served, "sk-root", "GET", ended).text)
    assert "of-bob" not in _ask(served, "sk-ann", "GET", ended).text
    for key, ids in (("sk-ann", {"of-ann"}), ("sk-root", {"of-ann", "of-bob"})):
        told = _ask(served, key, "GET", ended).json()["ended"]
        assert {r["id"] for r in told if r["id"].startswith("of-")} == ids


def test_a_key_cancels_its_own_requests_alone(served: Server) -> None:
    ways: list[tuple[str, str, Any]] = [
        ("DELETE", "/v1/requests/mine", None),
        ("POST", "/v1/requests/mine/cancel", {}),
        ("POST", "/abort_request", {"rid": "mine"}),
    ]
    for method, path, body in ways:
        with _running(served, "sk-ann", "mine") as lines:
            refused = _ask(served, "sk:bob", method, path, body)
            unknown = _ask(served, "sk:bob", method, path.replace("mine", "none"),
                           body and {"rid": "none"})  # fmt: skip
            assert refused.status_code == unknown.status_code == 404
            assert refused.text.replace("mine", "none") == unknown.text
            assert _ask(served, "sk:bob", "POST", "/abort_request", {"abort_all": True}).json() == {
                "aborted": 0
            }
            next(lines)
            assert _ask(served, "sk-ann", method, path, body).status_code == 200
            assert "cancelled" in "".join(lines)
    with _running(served, "sk-ann", "all-of-ann") as lines:
        aborted = _ask(served, "sk-ann", "POST", "/abort_request", {"abort_all": True})
        assert aborted.json() == {"aborted": 1}
        assert "cancelled" in "".join(lines)
    with _running(served, "sk-ann", "by-root") as lines:
        assert _ask(served, "sk-root", "DELETE", "/v1/requests/by-root").status_code == 200
        assert "cancelled" in "".join(lines)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/generate", {"model": "served", "prompt": "a", "raw": True, "stream": False,
                           "options": {"num_predict": 1}}, "keep_alive"),
        ("/v1/completions", {"model": "served", "prompt": "a", "max_tokens": 1}, "ttl"),
    ],
)  # fmt: skip
def test_how_long_a_model_stays_is_for_administrators_to_say(
    served: Server, path: str, body: Any, field: str
) -> None:
    told = _ask(served, "sk-ann", "POST", path, body | {field: "5m"})
    assert told.status_code == 200 and told.headers["x-millrace-ignored"] == field
    assert "expires_at" not in _ask(served, "sk-ann", "GET", "/v1/models/served").json()
    wrong = _ask(served, "sk-ann", "POST", path, body | {field: "soon"})
    assert wrong.status_code == 400
    told = _ask(served, "sk-root", "POST", path, body | {field: "5m"})
    assert "x-millrace-ignored" not in told.headers
    assert "expires_at" in _ask(served, "sk-root", "GET", "/v1/models/served").json()
    _ask(served, "sk-root", "POST", path, body | {field: -1})


OUTSIDE = [
    ("POST", "/api/show", {"model": "spare"}),
    ("POST", "/v1/completions", {"model": "spare", **SHORT}),
    ("GET", "/v1/models/spare", None),
]
OUTSIDE_OF_ADMINS = [
    ("POST", "/api/pull", {"model": "spare"}),
    ("POST", "/api/pull", {"model": "org/name"}),
    ("DELETE", "/api/delete", {"model": "spare"}),
    ("POST", "/v1/models/spare/load", {}),
    ("POST", "/v1/models/spare/unload", {}),
    ("POST", "/v1/models/spare/pin", {}),
    ("POST", "/models/load", {"model": "spare"}),
    ("POST", "/models/unload", {"model": "spare"}),
]


@pytest.mark.parametrize(
    ("key", "method", "path", "body"),
    [("sk-ann", *case) for case in OUTSIDE]
    + [("sk-root", *case) for case in OUTSIDE + OUTSIDE_OF_ADMINS],
)
def test_models_outside_only_are_unknown_to_all(
    served: Server, home: Path, key: str, method: str, path: str, body: Any
) -> None:
    name = "org/name" if body == {"model": "org/name"} else "spare"
    unknown = json.loads(json.dumps(body).replace(name, "no-such")) if body else body
    refused = _ask(served, key, method, path, body)
    other = _ask(served, key, method, path.replace(name, "no-such"), unknown)
    assert refused.status_code == other.status_code == 404
    assert refused.text == other.text.replace("no-such", name)
    assert (home / "models" / "spare" / "config.json").is_file()


def test_a_pull_of_what_is_served_succeeds_with_only(served: Server) -> None:
    body = {"model": "served:latest", "stream": False}
    assert _ask(served, "sk-root", "POST", "/api/pull", body).json() == {"status": "success"}


def test_commands_that_manage_want_an_admin_key(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: str, **env: str) -> Result:
        for name in ("MILLRACE_API_KEY", "MILLRACE_ADMIN_KEY"):
            monkeypatch.delenv(name, raising=False)
        return CliRunner().invoke(app, [*args, "--url", served.url], env=env)

    refused = run("stop", "served", MILLRACE_API_KEY="sk-ann").exception
    assert isinstance(refused, RoleNeeded)
    assert all(word in refused.message for word in GRANT)
    assert "takes the key from --api-key or MILLRACE_ADMIN_KEY" in refused.message
    both = {"MILLRACE_API_KEY": "sk-ann", "MILLRACE_ADMIN_KEY": "sk-root"}
    with _running(served, "sk:bob", "of-bob-too"):
        assert "of-bob-too" in run("ps", "--json", **both).stdout
        shown = run("ps", "--json", MILLRACE_API_KEY="sk-ann").stdout
        assert '"served"' in shown and "of-bob-too" not in shown
    assert "not loaded any more" in run("stop", "served", **both).stdout
    assert _ask(served, "sk-root", "POST", "/v1/models/served/load", {}).status_code == 200
