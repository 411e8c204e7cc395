"""The page in a real browser, against real servers: what a person does with it."""

from __future__ import annotations

import json
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from conftest import Server

from .conftest import NARROW, WIDE, Watched, answered, ask, picture, until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

Tab = Callable[..., Watched]


def png(width: int = 32, height: int = 32) -> bytes:
    """A red picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff\0\0" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_chat_is_streamed_shown_as_markdown_and_kept(served: Server, tab: Tab) -> None:
    page = tab(served).page
    ask(page, "Tell me about mills.")
    page.wait_for_selector(".turn.live")
    answered(page, 1)
    turn = page.locator(".turn.assistant")
    assert turn.locator("h3").inner_text() == "How fast it runs"
    assert turn.locator("math").count() == 3
    assert turn.locator("table tbody tr").count() == 2
    assert "return radius" in turn.locator(".code code").inner_text()
    assert turn.locator(".code .keyword").all_inner_texts() == ["def", "return"]
    assert turn.locator(".list").inner_text() == "", "no calls, no cards"
    thought = turn.locator("details.thought")
    assert not thought.get_attribute("open"), "thoughts are folded"
    assert re.search(r"to first token · .*tokens/s", turn.locator(".meta").inner_text())
    assert re.match(r"[\d,]+ of 65,536", page.locator(".meter span").inner_text())
    page.reload()
    page.locator(".talks li button").first.click()
    answered(page, 1)
    assert page.locator(".turn.user").inner_text().startswith("Tell me about mills.")


def test_one_can_type_and_send_before_the_rest_of_the_page_has_come(
    served: Server, tab: Tab
) -> None:
    page = tab(served).page
    held: dict[str, Route] = {}

    def hold(name: str) -> Callable[[Route], None]:
        """The first request for it; it is asked for again once it is in the browser's cache."""
        return lambda route: route.continue_() if name in held else held.update({name: route})

    for name in ("desk", "turn"):
        page.route(f"**/{name}.js", hold(name))

    def come(name: str) -> None:
        while name not in held:  # the tests' own time limit ends this
            page.wait_for_timeout(20)
        held[name].continue_()

    page.reload()
    page.wait_for_selector("html[data-ready]")
    until(page, "() => checks.focused() === 'Message'")
    page.keyboard.type("What is it?")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 0
    come("desk")
    until(page, "() => document.querySelector('form textarea').value === ''")
    ask(page, "And this?")
    page.get_by_role("button", name="Settings").click()
    page.wait_for_selector("dialog[aria-label='Settings']")
    assert page.locator(".turn").count() == 0
    come("turn")
    answered(page, 1)
    assert page.get_by_label("Message", exact=True).input_value() == "And this?"
    assert page.locator(".turn.user").inner_text().startswith("What is it?")


def test_an_answer_is_stopped_edited_branched_and_made_again(served: Server, tab: Tab) -> None:
    page = tab(served).page
    ask(page, "Say something long.")
    until(
        page,
        "document.querySelector('.turn.assistant .text:not(.thought *)')?.textContent.length > 200",
    )
    page.keyboard.press("Escape")
    answered(page, 1)
    assert "stopped" in page.locator(".turn.assistant .meta").inner_text()
    for _ in range(100):
        if not any(m["requests"] for m in served.http.get("/v1/status").json()["models"]):
            break
    page.locator(".turn.user").get_by_label("Edit").click()
    page.get_by_label("Edit message").fill("This is edited.")
    page.locator(".edit").get_by_text("Send").click()
    answered(page, 1)
    assert "the edited question" in page.locator(".turn.assistant").inner_text()
    assert page.locator(".turn.user .branch").inner_text() == "2/2"
    page.locator(".turn.user").get_by_label("Previous version").click()
    assert page.locator(".turn.user .said").inner_text() == "Say something long."
    page.locator(".turn.user").get_by_label("Next version").click()
    page.locator(".turn.assistant").get_by_label("Regenerate").click()
    answered(page, 1)
    assert page.locator(".turn.assistant .branch").inner_text() == "2/2"


def test_a_conversation_is_exported_deleted_imported_and_found(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    page = tab(served).page
    ask(page, "A needle in the hay.")
    answered(page, 1)
    ask(page, "And once more.")
    answered(page, 2)
    page.get_by_label("Export chat").click()
    with page.expect_download() as caught:
        page.get_by_role("button", name="JSON").click()
    file = tmp_path / "talk.json"
    caught.value.save_as(file)
    assert len(json.loads(file.read_text())["nodes"]) == 4
    page.get_by_label("Delete A needle in the hay.").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_selector("text=No chats yet.")
    page.locator("input[type=file][accept]").set_input_files(file)
    answered(page, 2)
    page.get_by_label("Search chats").fill("NEEDLE")
    until(page, "document.querySelectorAll('.talks li button[title]').length >= 1")
    page.get_by_label("Search chats").fill("nothing like it")
    page.wait_for_selector("text=No results.")


def test_what_is_imported_is_checked(served: Server, tab: Tab, tmp_path: Path) -> None:
    page = tab(served).page
    evil = {
        "version": 1, "title": "<img src=x onerror=alert(1)>", "settings": {"system": {"a": 1}},
        "root": {"children": ["a", "a", "zzz"], "chosen": "a"},
        "nodes": {
            "a": {"role": "user", "parent": None, "children": ["b", "a"], "chosen": "b", "content": "hi",
                  "attachments": [{"kind": "picture", "name": "x", "data": "https://evil.example/x.png"}]},
            "b": {"role": "assistant", "parent": "a", "children": ["a"], "chosen": "a", "content": 7},
        },
    }  # fmt: skip
    for number, content in enumerate(
        (json.dumps(evil), "[]", "{", '{"version": 1, "nodes": {"a": {}}}')
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(content)
        page.locator("input[type=file][accept]").set_input_files(file)
        page.wait_for_selector(f".toast >> nth={number}")
    assert "imported" in page.locator(".toast").first.inner_text()
    assert page.locator(".toast.bad").count() == 3
    assert page.locator(".turn").count() == 2
    assert page.locator(".turn img").count() == 0


def test_a_picture_goes_to_a_model_that_sees_and_to_no_other(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    page = tab(served).page
    picture, text = tmp_path / "red.png", tmp_path / "note.txt"
    picture.write_bytes(png())
    text.write_text("a note")
    chooser = page.locator(".composer input[type=file]")
    chooser.set_input_files([picture])
    page.wait_for_selector(".toast.bad:has-text('does not support images')")
    page.get_by_label("Model", exact=True).select_option("seer")
    chooser.set_input_files([picture, text])
    page.wait_for_selector(".composer .file >> nth=1")
    page.get_by_label("Settings").click()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Save", exact=True).click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is this?")
    body = sent.value.post_data_json
    assert body["max_tokens"] == 8
    parts = body["messages"][0]["content"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert "a note" in parts[1]["text"] and "What is this?" in parts[1]["text"]
    answered(page, 1)
    assert page.locator(".turn.user img").count() == 1
    assert page.locator(".turn.assistant .error:not([hidden])").count() == 0
    page.get_by_label("Model", exact=True).select_option("miller")


PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = json.dumps([{"name": "weather", "parameters": PLACE}])


def test_a_tool_call_is_a_card_whose_result_goes_on(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.get_by_label("Settings").click()
    page.get_by_label("Tools").fill("{")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector("dialog .bad:has-text('valid JSON')")
    page.get_by_label("Tools").fill(TOOLS)
    page.get_by_role("button", name="Save", exact=True).click()
    ask(page, "How is the weather?")
    answered(page, 1)
    card = page.locator(".call")
    picture(page, "tool")
    assert "weather" in card.locator("header").inner_text()
    assert "Delft" in card.locator("pre").inner_text()
    page.get_by_label("Result of weather").fill("sunny, 21 degrees")
    page.get_by_role("button", name="Send result").click()
    answered(page, 2)
    assert "It is sunny in Delft." in page.locator(".turn.assistant").last.inner_text()


def _stream(server: Server, id: str, ended: dict[str, str]) -> None:
    body = {"model": "miller", "messages": [{"role": "user", "content": "long"}], "stream": True}
    body |= {"max_tokens": 3000}
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        json=body,
        headers={"x-request-id": id},
        timeout=120,
    ) as response:
        ended[id] = response.read().decode()[-400:]


def test_the_dashboard_shows_eight_requests_and_cancels_one(served: Server, tab: Tab) -> None:
    watched = tab(served, "dashboard")
    page = watched.page
    ended: dict[str, str] = {}
    threads = [
        threading.Thread(target=_stream, args=(served, f"eight-{n}", ended)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    try:
        until(page, "document.querySelectorAll('[data-request]').length === 8")
        page.wait_for_selector("[data-request] .pill.good >> nth=7")
        picture(page, "dashboard")
        page.get_by_label("Cancel eight-3").click()
        page.wait_for_selector("[data-request='eight-3']", state="detached")
        assert page.locator("[data-request]").count() >= 1
        for path in page.locator(".plot path.line").all():
            assert path.get_attribute("d")
        page.get_by_role("button", name="Show log").click()
        page.wait_for_selector(".log div:has-text('eight-3')")
    finally:
        for number in range(8):
            served.post(f"/v1/requests/eight-{number}/cancel", None)
        for thread in threads:
            thread.join()
    assert "cancelled" in ended["eight-3"]
    page.wait_for_selector("td:has-text('eight-3')")


def test_a_model_is_unloaded_pinned_and_loaded(served: Server, tab: Tab) -> None:
    page = tab(served, "models").page
    card = page.locator("[data-model='second']")

    def becomes(state: str) -> None:
        page.wait_for_selector(f"[data-model='second'] .pill:text-is('{state}')")

    if card.locator(".pill").first.inner_text() == "on disk":
        card.get_by_role("button", name="Load").click()
    becomes("loaded")
    card.get_by_role("button", name="Pin").click()
    becomes("pinned")
    card.get_by_role("button", name="Unpin").click()
    page.wait_for_selector("[data-model='second'] .pill:text-is('pinned')", state="detached")
    card.get_by_role("button", name="Unload").click()
    becomes("on disk")
    assert served.http.get("/v1/models/second").json()["state"] == "unloaded"
    card.get_by_role("button", name="Load").click()
    becomes("loaded")


def test_snippets_have_the_real_address_and_model(served: Server, tab: Tab) -> None:
    page = tab(served, "connect").page
    page.get_by_label("Model", exact=True).select_option("second")
    names = page.get_by_role("tab").all_inner_texts()
    assert len(names) >= 8
    for name in names:
        page.get_by_role("tab", name=name, exact=True).click()
        code = page.locator("#snippet code").inner_text()
        assert served.url in code and "second" in code, name
    page.get_by_role("tab", name="curl", exact=True).click()
    assert "/v1/chat/completions" in page.locator("#snippet code").inner_text()


@pytest.fixture
def guarded(models: Path) -> Iterator[Server]:
    running = Server(
        f"second={models / 'second'}", "--trust-remote-code", "--api-key", "sk-door",
        "--admin-key", "sk-office", env={"MILLRACE_HOME": str(models / "home")}, only=False,
    ).wait_ready()  # fmt: skip
    yield running
    running.stop()


def test_a_server_with_keys_asks_for_one_and_the_tab_keeps_it(guarded: Server, tab: Tab) -> None:
    page = tab(guarded).page
    field = page.get_by_role("dialog").get_by_label("API key")
    field.fill("wrong")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("dialog .bad:has-text('Invalid API key')")
    field.fill("sk-door")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("dialog", state="detached")
    ask(page, "Hello.")
    answered(page, 1)
    assert "water's way" in page.locator(".turn.assistant").inner_text()
    kept = page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert "sk-door" not in kept
    page.goto(f"{guarded.url}/#connect")
    page.wait_for_selector("#snippet code:has-text('MILLRACE_API_KEY')")


def _unlock(page: Page, key: str) -> None:
    page.get_by_role("dialog").get_by_label("API key").fill(key)
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("dialog", state="detached")


def test_what_a_key_has_no_role_for_is_switched_off_with_the_reason(
    guarded: Server, tab: Tab
) -> None:
    page = tab(guarded).page
    _unlock(page, "sk-door")
    page.goto(f"{guarded.url}/#models")
    unload = page.locator("[data-model=second]").get_by_role("button", name="Unload")
    unload.wait_for()
    assert unload.is_disabled() and "--admin-key" in (unload.get_attribute("title") or "")
    assert "role 'admin'" in page.locator("[role=note]:visible").inner_text()
    page.wait_for_selector("[data-offer]")
    assert not page.get_by_role("searchbox", name="Search models").is_visible()
    assert page.get_by_role("button", name=re.compile("^Fetch ")).count() == 0
    page.goto(f"{guarded.url}/#dashboard")
    page.wait_for_selector("[role=note]:has-text('those of your key'):visible")
    empty = page.get_by_role("button", name="Clear cache")
    empty.wait_for()
    assert empty.is_disabled() and page.get_by_role("button", name="Show log").is_disabled()
    page.get_by_role("button", name="API key").click()
    _unlock(page, "sk-office")
    until(page, "[...document.querySelectorAll('[role=note]')].every((n) => n.hidden)")
    assert empty.is_enabled() and page.get_by_role("button", name="Show log").is_enabled()
    page.goto(f"{guarded.url}/#models")
    page.get_by_role("searchbox", name="Search models").wait_for()
    assert unload.is_enabled()


SHOWN = {
    "chat": ".turn.assistant math",
    "dashboard": ".wide td",
    "models": "[data-model]",
    "connect": "#snippet .string",
}
"""What is there once a view has all it shows."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_every_view_fits_and_can_be_read(
    served: Server, tab: Tab, size: dict[str, int], scheme: str
) -> None:
    page = tab(served, viewport=size, color_scheme=scheme).page
    ask(page, "Tell me about mills.")
    answered(page, 1)
    for view, content in SHOWN.items():
        page.goto(f"{served.url}/#{view}")
        page.wait_for_selector(content)
        assert page.evaluate("checks.width()") <= size["width"], view
        assert page.evaluate("checks.unnamed()") == [], view
        assert page.evaluate("checks.faint()") == [], (view, scheme)
        picture(page, f"{view}-{size['width']}-{scheme}")


def test_everything_can_be_done_from_the_keyboard(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.keyboard.type("Hello there.")
    page.keyboard.press("Enter")
    answered(page, 1)
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Edit message"
    page.keyboard.press("Escape")
    for number, view in enumerate(("chat", "dashboard", "models", "connect"), 1):
        page.keyboard.press(f"Alt+{number}")
        page.wait_for_selector(f"#top nav a[href='#{view}'][aria-current]")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".hello")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message"
    assert page.locator("#said").inner_text().startswith("Response: Once more")


def test_a_lost_server_is_told(models: Path, tab: Tab) -> None:
    server = Server(f"second={models / 'second'}", "--trust-remote-code").wait_ready()
    page = tab(server, "dashboard").page
    page.wait_for_selector(".stat b")
    server.stop()
    page.wait_for_selector(".error:has-text('connection'):not([hidden])")
