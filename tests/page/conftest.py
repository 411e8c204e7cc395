"""A browser, and servers for it: run by `make test-page`, in an environment of its own without MLX.

The browser is Debian's chromium, or what MILLRACE_BROWSER names; without one, the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import PYTHON, ROOT, Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

collect_ignore_glob = [] if "MILLRACE_PAGE" in os.environ else ["test_*.py"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHECKS = Path(__file__).with_name("checks.js")
STRANGER = "attacker.example"
"""The name of a web site that points at this machine."""
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


def _found() -> str | None:
    named = os.environ.get("MILLRACE_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models whose words are written down (script.py), and of one that sees."""
    folder = tmp_path_factory.mktemp("page")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    program = Path(__file__).with_name("script.py")
    subprocess.run(
        [PYTHON, str(program), str(folder)], check=True, env=os.environ | {"PYTHONPATH": paths}
    )
    return folder


@pytest.fixture(scope="session")
def served(models: Path) -> Iterator[Server]:
    running = Server(
        f"miller={models / 'miller'}", f"second={models / 'second'}", f"seer={models / 'seer'}",
        "--trust-remote-code", "--memory", "8G", env={"MILLRACE_HOME": str(models / "home")},
    )  # fmt: skip
    yield running.wait_ready()
    running.stop()
    assert "Traceback" not in running.log()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = _found()
    if path is None:
        pytest.skip("no chromium here: install one, or name it in MILLRACE_BROWSER")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Who runs this as root, as containers do, has no sandbox to offer.
        args = ["--no-sandbox", f"--host-resolver-rules=MAP {STRANGER} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=path, args=args)
        yield browser
        browser.close()


def until(page: Page, expression: str, arg: Any = None, seconds: float = 60) -> None:
    """Wait until an expression is true; Playwright's own way runs text in the page, which forbids it."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, count: int) -> None:
    """Wait until so many answers are there and the last one is whole."""
    until(page, "n => checks.answered(n)", arg=count)


def picture(page: Page, name: str) -> None:
    """Write down how it looks, where MILLRACE_PICTURES names a folder."""
    if folder := os.environ.get("MILLRACE_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png")


class Watched:
    """A tab, and all that went wrong in it or was asked of anybody but the server."""

    def __init__(self, page: Page, own: str) -> None:
        self.page = page
        self.troubles: list[str] = []
        self.foreign: list[str] = []
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self._dialog(dialog))
        page.on("console", lambda line: self._console(line))
        page.on("request", lambda request: self._request(request.url, own))

    def _dialog(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _console(self, line: Any) -> None:
        # A refused request is logged by the browser itself, and told by the page.
        if line.type == "error" and "Failed to load resource" not in line.text:
            self.troubles.append(f"console: {line.text}")

    def _request(self, url: str, own: str) -> None:
        if not url.startswith((own, "data:", "blob:")):
            self.foreign.append(url)


@pytest.fixture
def tab(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Open a server's page in a profile of its own; nothing may go wrong in it."""
    opened: list[tuple[BrowserContext, Watched]] = []

    def open(
        server: Server,
        view: str = "chat",
        script: str = "",
        missing: tuple[str, str] | None = None,
        **options: Any,
    ) -> Watched:
        """`missing` is a file that cannot be fetched until the context's routes are taken away: `lost`
        on its way, or `gone` from the server."""
        wanted = {"viewport": WIDE, "color_scheme": "light"} | options
        context = browser.new_context(**wanted)
        context.set_default_timeout(60_000)
        context.add_init_script(path=CHECKS)
        if script:
            context.add_init_script(script)
        if missing:
            name, how = missing
            lost, gone = lambda route: route.abort(), lambda route: route.fulfill(status=404)
            context.route(f"**/{name}", lost if how == "lost" else gone)
        watched = Watched(context.new_page(), server.url)
        opened.append((context, watched))
        watched.page.goto(f"{server.url}/#{view}")
        watched.page.wait_for_selector("html[data-ready]")
        return watched

    yield open
    for context, watched in opened:
        context.close()
        assert watched.troubles == []
        assert watched.foreign == []
