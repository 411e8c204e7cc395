"""The dashboard's charts and numbers: true axes and times, gaps, and what a lost server leaves."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import conftest
import pytest
from conftest import Server

from .conftest import NARROW, WIDE, Watched, picture, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., Watched]
FEED = Path(__file__).with_name("feed.js").read_text()
sizes = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
schemes = pytest.mark.parametrize("scheme", ["light", "dark"])


def _shown(served: Server, tab: Tab, history: str, **options: Any) -> Page:
    """The dashboard with a status stream of our own, which begins with this history."""
    script = FEED + f"feed.first = [['history', () => {history}], ['status', () => feed.status()]];"
    page = tab(served, "dashboard", script=script, **options).page
    page.wait_for_selector(".plot path.line")
    return page


def _texts(page: Page, kind: str) -> list[list[str]]:
    """The labels of each chart's axis."""
    return [
        plot.locator(f"text.{kind}").all_text_contents() for plot in page.locator(".plot").all()
    ]


@schemes
@sizes
def test_charts_have_axes_with_units_and_times_of_the_clock(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    history = "feed.history([480, 0])"
    page = _shown(served, tab, history, viewport=size, color_scheme=scheme)
    assert page.get_by_role("heading", name="Last 8 minutes").is_visible()
    tokens, requests, memory, hits = _texts(page, "y")
    assert tokens[0] == "0" and "40,000" in tokens
    assert requests[0] == "0"
    assert memory == ["0 B", "10 kB", "20 kB", "30 kB", "40 kB"]
    assert hits == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert [u for (u,) in _texts(page, "unit")[:2]] == ["tokens/s", "requests"]
    plot = page.locator(".plot").first
    times = plot.locator("text.x").all_text_contents()
    assert len(times) >= 2 and all(re.fullmatch(r"\d\d:\d\d( [AP]M)?", t) for t in times)
    # What the pointer reads where a label is, is what the label says.
    mark = plot.locator("text.x").first.bounding_box()
    area = plot.locator("svg").bounding_box()
    assert mark and area
    page.mouse.move(mark["x"] + mark["width"] / 2, area["y"] + area["height"] / 2)
    read = plot.locator(".legend span").first.inner_text()
    pattern = "%I:%M:%S %p" if "M" in read else "%H:%M:%S"
    wanted = datetime.strptime(times[0], pattern.replace(":%S", ""))
    assert abs((datetime.strptime(read, pattern) - wanted).total_seconds()) <= 3
    page.mouse.move(0, 0)
    assert page.evaluate("checks.width()") <= size["width"]
    assert page.evaluate("checks.faint()") == []
    picture(page, f"charts-{size['width']}-{scheme}")


def test_every_chart_has_two_times_of_the_clock_whatever_the_time(served: Server, tab: Tab) -> None:
    page = _shown(served, tab, "feed.history([480, 0])")
    assert page.evaluate("checks.badTicks()") == []


@schemes
@sizes
def test_times_without_samples_are_gaps(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    history = "feed.history([590, 400], [200, 0])"
    page = _shown(served, tab, history, viewport=size, color_scheme=scheme)
    plot = page.locator(".plot").first
    assert plot.locator(".gap").count() == 1
    for path in plot.locator("path").all():
        assert (path.get_attribute("d") or "").count("M") == 2, "nothing is drawn over the gap"
    gap, area = plot.locator(".gap rect").bounding_box(), plot.locator("svg").bounding_box()
    left = plot.locator("line.grid").first.get_attribute("x1")
    assert gap and area and left
    width = area["width"] - float(left) - 10
    assert abs(gap["width"] - width * 200 / 590) < 4, "it is as long as it was"
    page.mouse.move(gap["x"] + gap["width"] / 2, gap["y"] + 40)
    assert "no data" in plot.locator(".legend").inner_text()
    page.mouse.move(0, 0)
    picture(page, f"gaps-{size['width']}-{scheme}")


def test_a_restarted_server_leaves_a_gap_and_not_an_empty_chart(served: Server, tab: Tab) -> None:
    page = _shown(served, tab, "feed.history([300, 60])")
    page.evaluate(
        "feed.first = [['history', () => feed.history([10, 0])], feed.first[1]]; feed.end()"
    )
    until(page, "feed.connections === 2 && document.querySelectorAll('.stale').length === 0")
    plot = page.locator(".plot").first
    assert page.get_by_role("heading", name="Last 5 minutes").is_visible()
    assert plot.locator(".gap").count() == 1
    assert (plot.locator("path.line").first.get_attribute("d") or "").count("M") == 2


@sizes
def test_running_requests_do_not_push_the_charts_away(
    served: Server, tab: Tab, size: dict[str, int]
) -> None:
    page = _shown(served, tab, "feed.history([300, 0])", viewport=size)
    tops = "['.plots', 'section[aria-label=\"Loaded models\"]'].map((s) => Math.round("
    tops += "document.querySelector(s).getBoundingClientRect().top))"
    before = page.evaluate(tops)
    assert before[0] < size["height"] / 2, "the charts are seen without scrolling"
    page.evaluate("feed.send('status', feed.status(60))")
    until(page, "document.querySelectorAll('[data-request]').length === 60")
    after = page.evaluate(tops)
    assert after[0] == before[0]
    assert after[1] - before[1] < 450, "what is below stays near, too"
    assert page.evaluate("checks.width()") <= size["width"]
    picture(page, f"many-requests-{size['width']}")


def _grey(page: Page) -> list[bool]:
    """Whether each kind of number is drawn in the colour of what is dim."""
    return list(
        page.evaluate(
            """() => {
              const probe = document.querySelector(".page").appendChild(document.createElement("p"));
              probe.className = "dim";
              const dim = getComputedStyle(probe).color;
              probe.remove();
              const colour = (s) => getComputedStyle(document.querySelector(s)).color;
              return [".stat b", ".item .name"].map((s) => colour(s) === dim);
            }"""
        )
    )


@schemes
@sizes
def test_a_lost_servers_numbers_are_greyed_until_it_is_back(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    history = "feed.history([300, 0])"
    page = _shown(served, tab, history, viewport=size, color_scheme=scheme)
    assert _grey(page) == [False, False]
    assert page.locator(".error:not([hidden])").count() == 0
    page.evaluate("feed.down = true; feed.end()")
    page.wait_for_selector(".stale .error:has-text('The numbers are from'):not([hidden])")
    assert _grey(page) == [True, True]
    assert page.evaluate("checks.faint()") == []
    until(page, "document.querySelector('.plot .gap') !== null", seconds=30)  # time goes on
    picture(page, f"lost-{size['width']}-{scheme}")
    page.get_by_role("link", name="Models").click()
    page.wait_for_selector(".stale .error:not([hidden])")
    page.get_by_role("link", name="Dashboard").click()
    page.evaluate("feed.down = false")
    until(page, "document.querySelector('.stale') === null", seconds=30)
    assert _grey(page) == [False, False]
    assert page.locator(".error:not([hidden])").count() == 0


def test_a_frozen_server_is_noticed(served: Server, tab: Tab) -> None:
    page = _shown(served, tab, "feed.history([300, 0])")
    page.wait_for_selector(".stale .error:not([hidden])", timeout=30_000)
    until(page, "feed.connections === 2 && document.querySelector('.stale') === null")


def test_a_real_server_that_dies_and_comes_back(
    models: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"second={models / 'second'}"
    server = Server(folder, "--trust-remote-code").wait_ready()
    page = tab(server, "dashboard").page
    page.wait_for_selector(".item .name")
    server.process.kill()
    server.process.wait()
    page.wait_for_selector(".stale .stat b")
    monkeypatch.setattr(conftest, "free_port", lambda: server.port)
    again = Server(folder, "--trust-remote-code").wait_ready()
    try:
        until(
            page, "document.querySelector('.stale') === null && document.querySelector('.stat b')"
        )
    finally:
        again.stop()
