"""The page at /: who gets it, what it weighs, and that nothing in it can be made to run something else."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from millrace.api.app import create_app
from millrace.api.context import Context
from millrace.api.web import pages
from millrace.config import ApiKey, EngineConfig, ServeConfig
from millrace.models import blas, suggestions
from millrace.serving.catalogue import Catalogue
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace
from millrace.serving.registry import Registry

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.fixture(scope="module")
def app() -> Any:
    config = ServeConfig(
        engine=EngineConfig(model="none", name="none"), api_keys=(ApiKey(secret="sk-page"),)
    )
    metrics = Metrics()
    launcher = ModelLauncher(Workplace(), metrics, idle=1.0, max_queue=1)
    registry = Registry(Catalogue([]), launcher, metrics, limit=16 * 10**9)
    return create_app(Context(registry, config, metrics))


def _get(app: Any, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_browsers_get_the_page_and_others_json(app: Any) -> None:
    page = _get(app, "/", accept=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    for accept in ("*/*", "application/json", "application/json, text/plain, */*", ""):
        told = _get(app, "/", accept=accept)
        assert told.json()["name"] == "millrace"
        assert told.headers["vary"] == "Accept"
    assert page.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("TEXT/HTML", True),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
        ("text/html;q=0.5, application/json", False),
        ("application/json;q=0.1, text/html;q=0.2", True),
        ("text/*", False),
        ("text/htmlx", False),
        (",;,", False),
    ],
)
def test_html_is_for_who_asks_for_it_by_name(accept: str, html: bool) -> None:
    assert pages.wants_html(accept) is html


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_policy_lets_nothing_in(app: Any, path: str) -> None:
    page = _get(app, path, accept=BROWSER)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    text = page.text
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", text)
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", text)
    assert "@" not in text.replace("@web", ""), "every placeholder is filled"


def test_its_files_need_no_key_and_stay_where_they_are_as_long_as_they_are_the_same(
    app: Any,
) -> None:
    text = _get(app, "/", accept=BROWSER).text
    paths = set(re.findall(r'(?:src|href)="(/web/[^"]+)"', text))
    assert {p.rpartition("/")[2] for p in paths} >= {"app.js", "style.css", "icon.svg", "chat.js"}
    for path in paths:
        file = _get(app, path)
        assert file.status_code == 200, path
        assert "immutable" in file.headers["cache-control"]
        assert file.headers["x-content-type-options"] == "nosniff"
    known = next(iter(paths)).rpartition("/")[0]
    for wrong in ("/web/", "/web/000000000000/app.js", f"{known}/pages.py", f"{known}/index.html"):
        assert _get(app, wrong).status_code == 404
    for climbing in (f"{known}/..%2f..%2fapp.py", f"{known}/%2e%2e/%2e%2e/app.py"):
        assert _get(app, climbing).status_code in (401, 404)
    assert _get(app, "/v1/models").status_code == 401, "what it tells of the server needs one"


def test_it_weighs_less_than_a_quarter_of_a_megabyte() -> None:
    page = pages.page()
    assert sum(map(len, [*page.html.values(), *page.files.values()])) < 250_000


def test_its_scripts_make_no_markup_and_run_no_text() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|"
        r"createContextualFragment|DOMParser|srcdoc|setHTML|importScripts|"
        r"\bimport\((?!\"\./[a-z_]+\.js\"\))"
    )
    for name, content in pages.page().files.items():
        text = content.decode()
        assert not forbidden.search(text), name
        for imported in re.findall(r'(?:^import [{*].* from |\bimport\()"([^"]+)"', text, re.M):
            assert imported.startswith("./") and imported[2:] in pages.page().files, (
                name,
                imported,
            )
        assert len(text.splitlines()) <= 400, name


def test_the_library_tells_the_room_and_what_would_fit(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "mlx_backend", lambda: "metal")
    told = _get(app, "/v1/library", authorization="Bearer sk-page").json()
    assert (told["limit_bytes"], told["reserved_bytes"], told["models"]) == (16 * 10**9, 0, [])
    assert told["builtin"] is False
    shown = {s["name"]: s for s in told["suggested"]}
    nine = shown["qwen3.5-9b"]
    assert nine["fits"] and not shown["gpt-oss-120b"]["fits"]
    assert nine["source"] == "mlx-community/Qwen3.5-9B-MLX-4bit" and nine["bits"] == 4
    assert nine["uses"] == ["chat", "tools"] and nine["installed"] is False
    assert nine["fit_reason"] == "Needs about 8.6 GB of the 16.0 GB that models may use here."
    assert "more than the 16.0 GB" in shown["gpt-oss-120b"]["fit_reason"]
    assert shown["qwen3-8b-8bit"]["bits"] == 8
    assert [s["name"] for s in told["suggested"] if s["recommended"]] == ["gpt-oss-20b"]
    assert told["recommended"] == {
        "name": "gpt-oss-20b",
        "source": "mlx-community/gpt-oss-20b-MXFP4-Q8",
        "bytes": 12_100_000_000,
        "command": "millrace serve gpt-oss-20b",
    }


def test_the_best_that_fits_is_suggested_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "mlx_backend", lambda: "metal")
    found = suggestions.fitting(16 * 10**9)
    assert found[0].name == "gpt-oss-20b"
    assert [s.quality for s in found] == sorted((s.quality for s in found), reverse=True)
    assert suggestions.fitting(0) == []
