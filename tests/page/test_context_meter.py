"""The token meter: how much of the context a chat fills, while it streams and after it was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Server

from .conftest import NARROW, WIDE, Watched, answered, ask, picture, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., Watched]
METER = "document.querySelector('.meter span').textContent"


def _exact(page: Page, tokens: int) -> None:
    """Wait until the meter says so, and that it is no guess."""
    until(page, f"text => {METER} === text", f"{tokens:,} of 65,536", seconds=20)


def _generated(page: Page) -> int:
    """The tokens of the last answer, as its own line says."""
    parts = page.locator(".turn.assistant .meta").last.inner_text().split(" · ")
    (told,) = [p for p in parts if p.endswith(" tokens")]
    return int(told.removesuffix(" tokens").replace(",", ""))


def _ended(server: Server) -> dict[str, Any]:
    return dict(server.http.get("/v1/requests?limit=1").json()["ended"][0])


def _counted(server: Server, *said: tuple[str, str], **more: Any) -> int:
    messages = [{"role": role, "content": text} for role, text in said]
    body = {"model": "miller", "messages": messages, "add_generation_prompt": False} | more
    return int(server.post("/tokenize", body).json()["count"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_it_grows_while_an_answer_streams_and_is_right_when_it_is_stopped(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    page = tab(served, viewport=size, color_scheme=scheme).page
    ask(page, "Say something long.")
    until(page, f"/^[\\d,]+ of 65,536$/.test({METER})")
    first = page.evaluate(METER)
    until(page, f"text => {METER} !== text", first)
    until(page, "document.querySelector('.turn.live > .text')?.textContent.length > 300")
    picture(page, f"meter-{size['width']}-{scheme}")
    page.keyboard.press("Escape")
    answered(page, 1)
    until(page, "document.querySelector('.turn .meta')?.textContent.includes('stopped')")
    for _ in range(100):
        if _ended(served)["outcome"] != "ok":
            break
        page.wait_for_timeout(50)
    ended = _ended(served)
    assert 50 < _generated(page) <= ended["generated_tokens"]
    _exact(page, ended["prompt_tokens"] + _generated(page))
    page.reload()
    page.locator(".talks li button").first.evaluate("node => node.click()")
    answered(page, 1)
    _exact(page, ended["prompt_tokens"] + _generated(page))


def test_it_follows_edits_branches_and_settings(served: Server, tab: Tab) -> None:
    page = tab(served).page
    ask(page, "What is it?")
    answered(page, 1)
    ended = _ended(served)
    whole = ended["prompt_tokens"] + ended["generated_tokens"]
    _exact(page, whole)
    said = "No. " * 50
    page.get_by_label("Edit response").click()
    page.get_by_label("Edit message").fill(said)
    page.get_by_role("button", name="Save as new version").click()
    edited = _counted(served, ("user", "What is it?"), ("assistant", said))
    assert edited != whole
    _exact(page, edited)
    page.locator(".turn.assistant").get_by_label("Previous version").click()
    _exact(page, whole)
    page.locator(".turn.assistant").get_by_label("Next version").click()
    _exact(page, edited)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Answer briefly. " * 20)
    page.get_by_role("button", name="Save", exact=True).click()
    system = ("system", "Answer briefly. " * 20)
    _exact(page, _counted(served, system, ("user", "What is it?"), ("assistant", said)))
    page.get_by_label("Message", exact=True).fill("A draft of some words")
    until(page, f"{METER}.startsWith('~')")


def test_a_long_chat_is_counted_though_nothing_is_known_of_it(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    page = tab(served).page
    ids = [f"n{n}" for n in range(400)]
    texts = [f"message {n} " * 5 for n in range(400)]
    nodes = {
        id: {
            "role": ("user", "assistant")[n % 2], "content": texts[n],
            "parent": ids[n - 1] if n else None, "children": ids[n + 1 : n + 2],
        }
        for n, id in enumerate(ids)
    }  # fmt: skip
    file = tmp_path / "long.json"
    root = {"children": ids[:1]}
    file.write_text(json.dumps({"version": 1, "title": "Long", "root": root, "nodes": nodes}))
    page.locator("input[type=file][accept]").set_input_files(file)
    page.wait_for_selector(".turn:has-text('message 399')")
    said = [(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]
    _exact(page, _counted(served, *said))


def test_a_chat_that_no_longer_fits_fills_the_meter(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.get_by_label("Message", exact=True).fill("word " * 70_000)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .error:has-text('tokens long')")
    text = ("word " * 70_000).strip()
    _exact(page, _counted(served, ("user", text), add_generation_prompt=True))
    assert page.get_by_role("meter", name="Context used").get_attribute("aria-valuenow") == "100"
    assert page.locator(".meter .full").count() == 1
