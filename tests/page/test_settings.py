"""The settings of a chat: the model's defaults as numbers, and values that are checked before sending."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import Server

from .conftest import NARROW, WIDE, Watched, answered, ask, picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., Watched]
WRONG = {
    "Temperature": ("500", "from 0 to 100"),
    "Top P": ("0", "above 0 and at most 1"),
    "Top K": ("1.5", "a whole number, -1 or more"),
    "Min P": ("-1", "from 0 to 1"),
    "Repetition penalty": ("0", "from 0.01 to 100"),
    "Max tokens": ("0", "a whole number, 1 or more"),
    "Seed": ("0.5", "a whole number"),
}
RIGHT = {"Temperature": "0.7", "Top P": "0.9", "Max tokens": "64"}


def _open(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.wait_for_selector("dialog[aria-label='Settings']")


def test_the_models_defaults_are_shown_as_numbers(served: Server, tab: Tab) -> None:
    page = tab(served).page
    cards = {c["id"]: c for c in served.http.get("/v1/models").json()["data"]}
    for model, temperature in (("second", "0.3"), ("miller", "1")):
        page.get_by_label("Model", exact=True).select_option(model)
        _open(page)
        found = cards[model]["default_sampling_params"]
        shown = {
            label: page.get_by_label(label, exact=True).get_attribute("placeholder")
            for label in WRONG
        }
        assert shown.pop("Temperature") == temperature
        assert shown.pop("Max tokens") == "4,096", "the page's own limit"
        assert shown.pop("Seed") == "random"
        names = ("top_p", "top_k", "min_p", "repetition_penalty")
        assert [float(v or "nan") for v in shown.values()] == [found[name] for name in names]
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_a_value_that_is_wrong_is_marked_with_a_sentence_and_not_sent(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    page = tab(served, viewport=size, color_scheme=scheme).page
    page.wait_for_selector(".bar option:text-is('miller')", state="attached")
    _open(page)
    for label, (value, _) in WRONG.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Tools").fill("{")
    page.get_by_role("button", name="Save", exact=True).click()
    for label, (_, sentence) in WRONG.items():
        field = page.locator("label.field", has=page.locator(f"text='{label}'"))
        assert f"{label} must be" in field.locator("small").inner_text()
        assert sentence in field.locator("small").inner_text()
        assert field.locator("[aria-invalid]").count() == 1
    assert "valid JSON" in page.locator("label.field small").last.inner_text()
    assert page.evaluate("checks.faint()") == []
    assert page.evaluate("document.activeElement.value") == "500", "the first wrong one is led to"
    picture(page, f"settings-{size['width']}-{scheme}")
    page.get_by_label("Top K", exact=True).focus()
    page.get_by_role("button", name="Reset to defaults").click()
    assert page.locator("[aria-invalid]").count() == 0
    page.get_by_label("Top P", exact=True).press_sequentially("1e")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector("[aria-invalid]")
    for label, value in RIGHT.items():
        page.get_by_label(label, exact=True).fill(value)
    assert page.locator("[aria-invalid]").count() == 0, "it is unmarked as soon as it is right"
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector("dialog", state="detached")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello.")
    body = sent.value.post_data_json
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 64)
    answered(page, 1)
    assert page.locator(".turn .error:not([hidden])").count() == 0


def test_imported_values_out_of_range_are_not_sent(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    page = tab(served).page
    settings = {"temperature": 500, "top_p": 0, "top_k": 1.5, "max_tokens": 0, "min_p": 0.1}
    nodes = {"a": {"role": "user", "content": "hi", "parent": None, "children": []}}
    chat = {"version": 1, "title": "x", "root": {"children": ["a"]}, "nodes": nodes}
    file = tmp_path / "x.json"
    file.write_text(json.dumps(chat | {"settings": settings}))
    page.locator("input[type=file][accept]").set_input_files(file)
    page.wait_for_selector(".turn.user")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello.")
    body = sent.value.post_data_json
    assert set(settings) & set(body) == {"min_p", "max_tokens"}
    assert (body["min_p"], body["max_tokens"]) == (0.1, 4096), "the page's own limit"
    answered(page, 1)
