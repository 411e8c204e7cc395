"""Messages of the page (toasts): seen in every view and dialog, and over nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Server

from .conftest import NARROW, WIDE, Watched, answered, ask, picture, until

Tab = Callable[..., Watched]
SHORT = "One chat exported."
LONG = "report.pdf: 12 MB is too large; text files may have up to 1 MB. " * 2
IN_SIGHT = """() => [...document.querySelectorAll(".toast")].every((toast) => {
  const box = toast.getBoundingClientRect();
  const under = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  const inside = box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight;
  return inside && toast.contains(under);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_toasts_cover_nothing(served: Server, tab: Tab, size: dict[str, int], scheme: str) -> None:
    page = tab(served, viewport=size, color_scheme=scheme).page
    ask(page, "Tell me about mills.")
    answered(page, 1)
    page.get_by_label("Message", exact=True).fill("A draft of\nthree\nlines")
    last = page.locator(".turn.assistant .meta")
    for view in ("chat", "dashboard", "models", "connect"):
        page.goto(f"{served.url}/#{view}")
        page.wait_for_selector(f"#top nav a[href='#{view}'][aria-current]")
        before = last.bounding_box() if view == "chat" else None
        page.evaluate("([...texts]) => checks.toast(...texts)", [SHORT, LONG])
        until(page, "document.querySelectorAll('.toast').length === 2")
        picture(page, f"toasts-{view}-{size['width']}-{scheme}")
        assert page.evaluate("checks.covered()") == [], view
        assert page.evaluate(IN_SIGHT), view
        assert page.evaluate("checks.faint()") == [], view
        assert page.evaluate("checks.width()") <= size["width"], view
        if before:
            moved = abs((last.bounding_box() or {"y": 0})["y"] - before["y"])
            assert moved < 2, "what is read stays where it is"
        for _ in range(2):
            page.get_by_label("Dismiss").first.click()
        assert page.locator(".toast").count() == 0


def test_toasts_are_seen_beside_an_open_list_of_chats(served: Server, tab: Tab) -> None:
    page = tab(served, viewport=NARROW).page
    page.get_by_role("button", name="Chats").click()
    page.wait_for_selector(".talks.open")
    page.evaluate("([...texts]) => checks.toast(...texts)", [SHORT])
    page.wait_for_selector(".toast")
    assert page.evaluate("checks.covered()") == [] and page.evaluate(IN_SIGHT)


def test_a_toast_is_shown_in_an_open_dialog_and_stays_when_it_closes(
    served: Server, tab: Tab
) -> None:
    page = tab(served, viewport=NARROW).page
    page.get_by_role("button", name="Settings").click()
    page.wait_for_selector("dialog[open]")
    page.evaluate("([...texts]) => checks.toast(...texts)", [SHORT, SHORT])
    page.wait_for_selector("dialog .toast")
    assert page.locator(".toast").count() == 1, "the same text is shown once"
    assert page.evaluate("checks.covered()") == [] and page.evaluate(IN_SIGHT)
    page.get_by_role("dialog").get_by_label("Close").click()
    page.wait_for_selector("#toasts .toast")
