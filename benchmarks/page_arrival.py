"""How long the page takes until one can type and send, at a first visit and at the next.

    .venv-page/bin/python benchmarks/page_arrival.py --server .venv/bin/python [--visits 30]

Every first visit has a browser and a profile of its own, whose empty window has been open for a while; a
new tab is then opened with the page's address. Nothing is attached to the browser before the page is there,
since a debugger takes a third of the time for itself. The page notes by itself when it is interactive. The
second visit is the same address in another tab of that browser. `make test-page` makes the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Playwright, sync_playwright

WANTED = 300.0
"""Milliseconds to interactive, at most."""
_SETTLED, _WHOLE = 1.5, 0.8
"""Seconds until a browser has come to rest after its start, and until a page is surely there."""
_READ = """() => {
  const [visit] = performance.getEntriesByType("navigation");
  const [mark] = performance.getEntriesByName("interactive");
  const files = performance.getEntriesByType("resource").map((e) => [e.name, e.startTime, e.responseEnd]);
  return { began: performance.timeOrigin, html: visit.responseEnd, interactive: mark.startTime, files };
}"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def process(command: list[str], alive: str) -> Iterator[None]:
    """A program for the time of the block, once it answers at `alive`."""
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(alive).status_code == 200:
                    break
            if running.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} does not answer at {alive}")
            time.sleep(0.05)
        yield
    finally:
        running.terminate()
        running.wait(30)


def visit(playwright: Playwright, browser: str, url: str) -> list[dict[str, Any]]:
    """A first and a second visit with a browser of their own: what the page says of each."""
    port = free_port()
    debugger = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--no-first-run", "about:blank"]
        command += [f"--user-data-dir={profile}", f"--remote-debugging-port={port}"]
        with process([*command, "--window-size=1280,860"], f"{debugger}/json/version"):
            time.sleep(_SETTLED)
            for _ in range(2):
                httpx.put(f"{debugger}/json/new?{url}").raise_for_status()
                time.sleep(_WHOLE)
            attached = playwright.chromium.connect_over_cdp(debugger)
            pages = [p for c in attached.contexts for p in c.pages if p.url.startswith(url)]
            told = [page.evaluate(_READ) for page in pages]
            attached.close()
    return sorted(told, key=lambda t: float(t["began"]))


def parts(told: dict[str, Any]) -> dict[str, float]:
    """Milliseconds since the address was asked for."""
    end = told["interactive"]
    before = [file for file in told["files"] if "/web/" in file[0] and file[1] < end]
    models = [file[2] for file in told["files"] if file[0].endswith("/v1/models")]
    return {
        "the HTML is there": told["html"],
        "its first file is asked for": min(file[1] for file in before),
        "all files that it needs first are there": max(file[2] for file in before if file[2] < end),
        "interactive": end,
        "the list of models is there": min(models, default=0.0),
    }


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="the interpreter that has millrace")
    parser.add_argument("--browser", default=shutil.which("chromium") or "google-chrome")
    parser.add_argument("--visits", type=int, default=30)
    parser.add_argument("--json")
    options = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [options.server, "-m", "millrace", "serve", "--port", str(port), "--cache-disk", "0"]
    found: list[list[dict[str, float]]] = []
    with process(command, f"{url}health"), sync_playwright() as playwright:
        for _ in range(options.visits):
            found.append([parts(told) for told in visit(playwright, options.browser, url)])
    for name, visits in zip(("first visit", "second visit"), zip(*found, strict=True), strict=True):
        print(f"{name} ({len(visits)} browsers): milliseconds, p50, p90, most")
        for part in visits[0]:
            values = [v[part] for v in visits]
            print(f"  {part:42}", *(f"{share(values, p):6.0f}" for p in (0.5, 0.9, 1.0)))
    most = max(first["interactive"] for first, _ in found)
    print(
        "PASS" if most < WANTED else "FAIL", f": {most:.0f} ms at most, wanted under {WANTED:.0f}"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
