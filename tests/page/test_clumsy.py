"""Those who break things, by intent or not: odd files, lost servers, forbidden storage, several tabs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import conftest
import httpx
import pytest
from conftest import Server

from .conftest import STRANGER, Watched, answered, ask, until
from .script import SECOND

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Tab = Callable[..., Watched]
RUN = "<img src=x onerror=globalThis.owned=1>"
FORBIDDEN = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
  const get = () => { throw new DOMException("forbidden", "SecurityError"); };
  Object.defineProperty(globalThis, name, { get });
}"""


def _import(page: Page, file: Path, content: str) -> None:
    file.write_text(content)
    page.locator("input[type=file][accept]").set_input_files(file)


def _chain(count: int, **more: Any) -> dict[str, Any]:
    """A conversation in which one message follows the other."""
    ids = [f"n{n}" for n in range(count)]
    nodes = {
        id: {
            "role": ("user", "assistant")[n % 2],
            "content": f"message {n}",
            "parent": ids[n - 1] if n else None,
            "children": ids[n + 1 : n + 2],
        }
        for n, id in enumerate(ids)
    }
    return {"version": 1, "title": "Long", "root": {"children": ids[:1]}, "nodes": nodes} | more


def test_a_conversation_of_many_thousand_messages_opens_and_goes_on(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    page = tab(served).page
    _import(page, tmp_path / "long.json", json.dumps(_chain(20_000)))
    page.wait_for_selector(".turn:has-text('message 19999')")
    assert page.locator(".turn").count() == 60
    page.get_by_role("button", name="Show earlier messages (19,940)").click()
    assert page.locator(".turn").count() == 120
    assert page.locator(".turn").first.inner_text().startswith("message 19880")
    page.locator(".turn.user").last.get_by_label("Edit").click()
    page.get_by_label("Edit message").fill("Shorter.")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".edit").get_by_text("Send").click()
    assert len(sent.value.post_data_json["messages"]) == 19_999
    answered(page, 60)


def test_settings_of_the_wrong_kind_are_left_out(served: Server, tab: Tab, tmp_path: Path) -> None:
    page = tab(served).page
    wrong = {"system": 5, "stop": ["x"], "tools": True, "seed": "x", "temperature": 0.5, "odd": "x"}
    wrong["model"] = RUN
    odd = _chain(2, settings=wrong, title=RUN * 3)
    odd["nodes"]["n1"]["meta"] = {"ttft": RUN, "rate": "x", "model": RUN, "prompt": "5", "error": 5}
    _import(page, tmp_path / "odd.json", json.dumps(odd))
    page.wait_for_selector(".turn.assistant:has-text('message 1')")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Go on.")
    body = sent.value.post_data_json
    assert {"temperature"} == {"temperature", "stop", "tools", "seed", "odd"} & set(body)
    assert body["messages"][0]["role"] == "user"
    answered(page, 2)
    assert page.evaluate("globalThis.owned ?? null") is None


@pytest.mark.parametrize(
    "content",
    [
        "null",
        "7",
        '"x"',
        "[" * 100_000,
        '{"conversations": [null]}',
        '{"version": 1, "nodes": [7]}',
    ],
)
def test_what_is_no_conversation_is_told_so(
    served: Server, tab: Tab, tmp_path: Path, content: str
) -> None:
    page = tab(served).page
    _import(page, tmp_path / "x.json", content)
    page.wait_for_selector(".toast.bad:has-text('Import failed')")
    assert "undefined" not in page.locator(".toast").inner_text()


def test_where_the_browser_keeps_nothing_the_tab_does(served: Server, tab: Tab) -> None:
    page = tab(served, script=FORBIDDEN).page
    ask(page, "Hello.")
    answered(page, 1)
    page.wait_for_selector(".toast.bad:has-text('lost when the tab is closed')")
    ask(page, "Once more.")
    answered(page, 2)
    assert page.locator(".toast.bad").count() <= 1, "it is told once"
    page.locator(".bar").get_by_label("New chat").click()
    page.locator(".talks li button").first.click()
    answered(page, 2)
    page.get_by_label("Search chats").fill("once MORE")
    until(page, "document.querySelector('.talks li')?.textContent.includes('Hello.')")
    page.get_by_label("Switch theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_two_tabs_do_not_lose_each_others_branches(served: Server, tab: Tab) -> None:
    first = tab(served).page
    ask(first, "One.")
    answered(first, 1)
    second = first.context.new_page()
    second.goto(first.url)
    second.locator(".talks li button").first.click()
    answered(second, 1)
    ask(second, "Two, there.")
    answered(second, 2)
    answered(first, 2)
    assert "Two, there." in first.locator(".turn.user").last.inner_text(), "it is shown, too"
    second.evaluate("globalThis.BroadcastChannel.prototype.postMessage = () => {}")
    second.locator(".turn.assistant").last.get_by_label("Regenerate").click()
    answered(second, 2)
    first.locator(".turn.assistant").last.get_by_label("Regenerate").click()
    answered(first, 2)
    first.reload()
    first.locator(".talks li button").first.click()
    answered(first, 2)
    assert first.locator(".turn.assistant .branch").inner_text().endswith("/3")
    second.evaluate("delete globalThis.BroadcastChannel.prototype.postMessage")
    first.locator(".talks").get_by_label("Delete One.").click()
    first.get_by_role("button", name="Delete", exact=True).click()
    first.wait_for_selector("text=No chats yet.")
    second.close()


PASTE = """([text]) => {
  const data = new DataTransfer();
  data.setData("text/plain", text.repeat(1000));
  const about = { clipboardData: data, bubbles: true, cancelable: true };
  document.activeElement.dispatchEvent(new ClipboardEvent("paste", about));
}"""


def test_a_long_text_that_is_pasted_becomes_a_file_and_ten_megabytes_are_refused(
    served: Server, tab: Tab
) -> None:
    page = tab(served).page
    page.wait_for_load_state("networkidle")
    page.evaluate(PASTE, ["x" * 10_000])
    page.wait_for_selector(".toast.bad:has-text('text files may have')")
    page.evaluate(PASTE, ["word " * 10])
    page.wait_for_selector(".composer .file:has-text('pasted.txt')")
    assert page.get_by_label("Message", exact=True).input_value() == ""
    page.get_by_label("Remove pasted.txt").click()
    page.wait_for_selector(".composer .file", state="detached")
    page.get_by_label("Message", exact=True).fill("long " * 400_000)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .error:has-text('tokens long')")
    assert len(page.locator(".turn.user .said").inner_text()) < 5000


def test_a_second_click_does_not_stop_what_the_first_began(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.get_by_label("Message", exact=True).fill("Hello.")
    page.locator(".round").dblclick()
    answered(page, 1)
    assert "stopped" not in page.locator(".turn.assistant .meta").inner_text()


def test_a_server_that_dies_in_the_middle_and_comes_back(
    models: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"miller={models / 'miller'}"
    server = Server(folder, "--trust-remote-code").wait_ready()
    page = tab(server).page
    ask(page, "Say something long.")
    until(
        page,
        "document.querySelector('.turn.live > .text')?.textContent.length > 50",
    )
    server.process.kill()
    server.process.wait()
    page.wait_for_selector(".turn.assistant .error:has-text('was lost'):not([hidden])")
    assert "The wheel turns" in page.locator(".turn.assistant").inner_text(), "what came is kept"
    page.get_by_label("Regenerate").click()
    page.wait_for_selector(".turn.assistant .error:has-text('cannot be reached'):not([hidden])")
    monkeypatch.setattr(conftest, "free_port", lambda: server.port)
    again = Server(folder, "--trust-remote-code").wait_ready()
    try:
        ask(page, "This is edited.")
        until(page, "document.body.textContent.includes('the edited question')")
    finally:
        again.stop()


def test_without_a_network_it_is_said_and_mended_by_itself(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.wait_for_load_state("networkidle")
    page.context.set_offline(True)
    ask(page, "Hello.")
    page.wait_for_selector(".turn.assistant .error:has-text('cannot be reached'):not([hidden])")
    page.context.set_offline(False)
    page.get_by_label("Regenerate").click()
    until(
        page, "text => document.querySelector('.turn.assistant').textContent.includes(text)", SECOND
    )


@pytest.mark.parametrize("missing", ["desk.js", "turn.js", "tex_symbols.js"])
def test_a_part_that_did_not_come_is_told_and_fetched_again(
    served: Server, tab: Tab, missing: str
) -> None:
    page = tab(served, missing=(missing, "lost")).page
    ask(page, "Hello.")
    page.wait_for_selector(".toast.bad:has-text('cannot be reached')")
    field = page.get_by_label("Message", exact=True)
    until(page, "text => document.querySelector('.composer textarea').value === text", "Hello.")
    assert page.locator(".turn").count() == 0
    page.context.unroute_all()
    until(page, "() => document.querySelector('.bar select').options.length > 1")
    field.press("Enter")
    until(
        page,
        "text => document.querySelector('.turn.assistant')?.textContent.includes(text)",
        SECOND,
    )
    assert page.locator(".turn").count() == 2


def test_a_view_that_did_not_come_is_told_and_fetched_again(served: Server, tab: Tab) -> None:
    page = tab(served, missing=("plot.js", "lost")).page
    page.get_by_role("link", name="Dashboard").click()
    page.wait_for_selector(".toast.bad:has-text('cannot be reached')")
    page.context.unroute_all()
    page.get_by_role("link", name="Chat", exact=True).click()
    page.get_by_role("link", name="Dashboard").click()
    page.wait_for_selector(".stat b")


def test_a_page_of_another_version_says_that_it_is(served: Server, tab: Tab) -> None:
    page = tab(served, missing=("turn.js", "gone")).page
    ask(page, "Hello.")
    page.wait_for_selector(".toast.bad:has-text('newer version')")


def test_a_hidden_tab_holds_no_connection_and_is_full_when_it_is_seen_again(
    served: Server, tab: Tab
) -> None:
    page = tab(served, "dashboard").page
    page.wait_for_selector(".stat b")
    hide = "h => { Object.defineProperty(document, 'hidden', { value: h, configurable: true }); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    with page.expect_event("requestfailed", lambda r: r.url.endswith("/v1/status/stream")):
        page.evaluate(hide, True)
    assert page.locator(".error:not([hidden])").count() == 0, "nothing is wrong"
    with page.expect_request("**/v1/status/stream"):
        page.evaluate(hide, False)


HOSTILE = {"id": f"{RUN}'; touch /tmp/x #\n\"$(id)", "object": "model", "state": "loaded"}


def test_names_of_models_requests_and_lines_of_the_log_are_only_text(
    served: Server, tab: Tab
) -> None:
    httpx.post(
        f"{served.url}/v1/completions",
        json={"model": f"<script>{RUN}", "prompt": "x"},
        headers={"x-request-id": RUN},
    )
    page = tab(served, "dashboard").page
    page.get_by_role("button", name="Show log").click()
    page.wait_for_selector(".log div:has-text('<img src=x')")
    listed = served.http.get("/v1/models").json()
    listed["data"] = [HOSTILE | {"created": 0, "context_window": 1}]
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    for view in ("chat", "models", "connect"):
        page.goto(f"{served.url}/#{view}")
        page.wait_for_timeout(200)
    until(page, "document.querySelector('#snippet code').textContent.includes('onerror')")
    code = page.locator("#snippet code").inner_text()
    data = code.partition("-d ")[2]
    assert "'\\''; touch /tmp/x #" in data and data.startswith("'") and data.endswith("}'")
    assert page.locator("#main img").count() == 0
    assert page.evaluate("globalThis.owned ?? null") is None


def test_a_key_of_odd_letters_is_told_so(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.locator("#tools").get_by_label("API key").click()
    page.get_by_role("dialog").get_by_label("API key").fill("clé\u200b")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("dialog .bad:has-text('of ASCII')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


CONTROLS = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "tab", "spinbutton"}
CONTROLS |= {"meter", "progressbar", "dialog", "image"}


@pytest.mark.parametrize("view", ["chat", "dashboard", "models", "connect"])
def test_a_screen_reader_has_a_name_for_everything(served: Server, tab: Tab, view: str) -> None:
    page = tab(served).page
    ask(page, "Tell me about mills.")
    answered(page, 1)
    page.goto(f"{served.url}/#{view}")
    page.wait_for_selector("#main > *")
    if view == "chat":
        page.get_by_label("Settings").click()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    told = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"]
    ]
    assert {role for role, _ in told} >= {"button", "banner" if view != "chat" else "dialog"}
    assert [role for role, name in told if role in CONTROLS and not name.strip()] == []


def test_by_tab_and_enter_alone_one_gets_everywhere(served: Server, tab: Tab) -> None:
    page = tab(served, "dashboard").page
    page.wait_for_selector(".stat b")
    seen: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("checks.focused()"))
        if seen[-1] == "Show log":
            break
    assert seen[0] == "Skip to content"
    assert {"Chat", "Models", "API key", "Switch theme", "Clear cache"} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_selector(".log:not([hidden])")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("checks.focused()") == "Hide log", "focus comes back to where it was"


def test_a_site_that_points_its_name_here_is_turned_away(served: Server, browser: Browser) -> None:
    page = browser.new_page()
    answer = page.goto(f"http://{STRANGER}:{served.port}/")
    assert answer is not None and answer.status == 403
    found = page.evaluate(
        """() => Promise.all([["/v1/models"], ["/v1/status"], ["/v1/cache", { method: "DELETE" }]]
          .map(async ([path, how]) => (await fetch(path, how)).status))"""
    )
    assert found == [403, 403, 403]
    page.close()
