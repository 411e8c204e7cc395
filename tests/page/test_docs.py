"""/docs in a browser: every endpoint opened, wide and on a phone, and Send pressed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Server

from .conftest import NARROW, WIDE, Watched, picture, until

Tab = Callable[..., Watched]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_every_endpoint_fits_and_can_be_read(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    page = tab(served, viewport=size, color_scheme=scheme).page
    page.goto(f"{served.url}/docs")
    until(page, "'ready' in document.documentElement.dataset")
    page.evaluate(
        "for (const box of document.querySelectorAll('section > details')) box.open = true"
    )
    until(page, "document.querySelectorAll('section > details textarea').length > 30")
    assert page.evaluate("checks.width()") <= size["width"]
    assert page.evaluate("checks.unnamed()") == []
    assert page.evaluate("checks.faint()") == []
    picture(page, f"docs-{size['width']}-{scheme}")


def test_examples_are_sent_as_they_stand(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.goto(f"{served.url}/docs")
    until(page, "'ready' in document.documentElement.dataset")
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/models/{name}/pin"):
        box = page.locator("details", has=page.locator(f"summary code:text-is('{path}')")).first
        box.locator("summary").first.click()
        box.get_by_role("button", name="Send").click()
        box.locator("pre:has-text('200')").wait_for()
        box.get_by_role("button", name="Send").wait_for()
        assert '"error"' not in box.locator("pre").first.inner_text(), path
        box.locator("summary").first.click()
