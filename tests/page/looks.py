"""The widths and colours that every part of the page is looked at in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .conftest import picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

PHONE, DESKTOP = {"width": 390, "height": 800}, {"width": 1280, "height": 860}
LOOKS = [
    pytest.param({"viewport": size, "color_scheme": scheme}, id=f"{size['width']}-{scheme}")
    for size in (PHONE, DESKTOP)
    for scheme in ("light", "dark")
]


def looked_at(page: Page, look: dict[str, Any], name: str) -> None:
    """Nothing is wider than the window, everything can be read and has a name; with a picture."""
    page.wait_for_timeout(250)  # panels slide in
    width = look["viewport"]["width"]
    picture(page, f"{name}-{width}-{look['color_scheme']}")
    assert page.evaluate("checks.width()") <= width
    assert page.evaluate("checks.unnamed()") == []
    assert page.evaluate("checks.faint()") == []


def is_narrow(look: dict[str, Any]) -> bool:
    return look["viewport"] is PHONE
