"""The model browser and the first visit: what is offered, explained and fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Server
from listing_hub import FakeHub

from .conftest import Watched, answered, ask, until
from .looks import LOOKS, looked_at

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., Watched]


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    running = FakeHub()
    yield running
    running.close()


@pytest.fixture(scope="module")
def visited(models: Path, hub: FakeHub) -> Iterator[Server]:
    """A server on a first visit: the built-in model, and a hub from which others can be fetched."""
    home = models / "visit"
    env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_ENDPOINT": hub.url}
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    running = Server("--memory", "8G", env=env, only=False).wait_ready()
    hub.models["acme/tiny-fetched"] = models / "fetchable"
    hub.models[_recommended(running)["source"]] = models / "fetchable"
    yield running
    running.stop()


def _recommended(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/v1/library").json()["recommended"]
    return found


def _as_if(page: Page, **changed: Any) -> None:
    """Have the page see another library than the server's."""

    def answer(route: Any) -> None:
        body = route.fetch().json() | changed
        route.fulfill(status=200, content_type="application/json", body=json.dumps(body))

    page.route("**/v1/library", answer)


@pytest.mark.parametrize("look", LOOKS)
def test_the_first_visit_says_what_the_built_in_model_is_for(
    visited: Server, tab: Tab, look: dict[str, Any]
) -> None:
    page = tab(visited, **look).page
    note = page.get_by_label("About the model")
    note.wait_for()
    text, best = note.inner_text(), _recommended(visited)
    assert "for trying things out" in text and "smollm2" in text
    assert best["name"] in text and re.search(r"\d+(\.\d+)? [GM]B to fetch", text)
    assert note.get_by_role("button", name=f"Fetch {best['name']}").is_visible()
    looked_at(page, look, "welcome")
    ask(page, "Hello.")
    answered(page, 1)
    assert not note.is_visible(), "it is gone once somebody talks"


def test_the_note_comes_after_the_page_can_be_used(visited: Server, tab: Tab) -> None:
    watched = tab(visited)
    page = watched.page
    page.get_by_label("About the model").wait_for()
    asked = page.evaluate(
        """(() => {
          const at = (part) => Math.min(...performance.getEntriesByType("resource")
            .filter((e) => e.name.includes(part)).map((e) => e.startTime));
          const [ready] = performance.getEntriesByName("interactive");
          return [ready.startTime, at("/v1/library"), at("welcome.js")];
        })()"""
    )
    assert asked[0] < asked[1] and asked[0] < asked[2]


def test_a_server_with_a_chosen_model_has_no_such_note(served: Server, tab: Tab) -> None:
    page = tab(served).page
    with page.expect_response("**/v1/library"):
        page.reload()
    page.wait_for_timeout(300)
    assert page.get_by_label("About the model").count() == 0


def test_where_nothing_better_fits_the_note_says_so(visited: Server, tab: Tab) -> None:
    page = tab(visited).page
    _as_if(page, recommended=None)
    page.reload()
    page.wait_for_selector(".welcome:has-text('fits this machine')")
    assert page.locator(".welcome button").count() == 0


def test_a_key_that_may_not_fetch_is_told_why(visited: Server, tab: Tab) -> None:
    page = tab(visited).page
    reason = "This needs an API key with the role 'admin'."
    key = {"required": True, "role": "use", "name": "ann", "reason": reason}
    page.route("**/v1/key", lambda route: route.fulfill(json=key))
    page.reload()
    page.wait_for_selector(f'.welcome:has-text("{reason}")')
    assert _recommended(visited)["name"] in page.locator(".welcome").inner_text()
    assert page.locator(".welcome button").count() == 0
    page.evaluate("location.hash = 'models'")
    page.wait_for_selector("[data-offer]")
    assert reason in page.locator("[role=note]:visible").inner_text()
    assert page.get_by_role("button", name=re.compile("^Fetch ")).count() == 0


@pytest.mark.parametrize("look", LOOKS)
def test_the_hub_is_searched_with_size_bits_and_fit(
    visited: Server, tab: Tab, look: dict[str, Any]
) -> None:
    page = tab(visited, "models", **look).page
    page.get_by_role("searchbox", name="Search models").fill("qwen3-0.6b")
    page.wait_for_selector("[role=status]:has-text('found on Hugging Face')")
    card = page.locator("[data-offer='Qwen/Qwen3-0.6B']")
    card.wait_for()
    for words in ("16 bits", "1.2 GB to fetch", "500 downloads", "Needs about"):
        assert words in card.inner_text(), words
    assert page.locator("[data-offer='mlx-community/Qwen3-0.6B-4bit']").count() == 1
    looked_at(page, look, "browser-search")
    page.get_by_role("searchbox", name="Search models").fill("acme/Qwen3-odd")
    page.wait_for_selector("[role=status]:has-text('found on Hugging Face')")
    assert page.locator("[data-offer='acme/Qwen3-odd']").count() == 0
    page.get_by_label("show models that do not fit").check()
    odd = page.locator("[data-offer='acme/Qwen3-odd']")
    assert "does not support its architecture, nobody_knows." in odd.inner_text()


@pytest.mark.parametrize("look", LOOKS)
def test_without_a_network_short_names_are_offered(
    visited: Server, tab: Tab, hub: FakeHub, look: dict[str, Any]
) -> None:
    page = tab(visited, "models", **look).page
    suggested = visited.http.get("/v1/library").json()["suggested"]
    fitting = [s for s in suggested if s["fits"] or s["installed"]]
    page.wait_for_selector("[data-offer]")
    assert page.locator("[data-offer]").count() == len(fitting) > 3
    first = page.locator("[data-offer]").first.inner_text()
    assert "recommended" in first and _recommended(visited)["name"] in first
    page.route("**/v1/hub/search**", lambda route: route.fulfill(
        status=503, content_type="application/json",
        body=json.dumps({"error": {"message": "Hugging Face did not answer within 4 seconds."}}),
    ))  # fmt: skip
    page.get_by_role("searchbox", name="Search models").fill("gemma")
    page.wait_for_selector("[role=status]:has-text('did not answer within 4 seconds. Short names')")
    named = {s["source"] for s in fitting if "gemma" in f"{s['name']} {s['source']}".lower()}
    offered = page.locator("[data-offer]").evaluate_all("all => all.map((n) => n.dataset.offer)")
    assert set(offered) == named and named
    looked_at(page, look, "browser-offline")


HELD = """
(() => {
  const real = globalThis.fetch;
  globalThis.fetch = (path, options) => {
    if (path !== "/api/pull") return real(path, options);
    const encoder = new TextEncoder(), line = (value) => encoder.encode(`${JSON.stringify(value)}\\n`);
    const body = new ReadableStream({ start(control) {
      control.enqueue(line({ status: "pulling manifest" }));
      control.enqueue(line({ status: "Fetching it", total: 4e9, completed: 1e9 }));
      globalThis.fail = () => { control.enqueue(line({ error: "The disk is full." })); control.close(); };
    } });
    return Promise.resolve(new Response(body));
  };
})()
"""


@pytest.mark.parametrize("look", LOOKS)
def test_a_fetch_shows_its_progress_in_every_view(
    visited: Server, tab: Tab, look: dict[str, Any]
) -> None:
    page = tab(visited, "models", **look).page
    page.evaluate(HELD)
    best = _recommended(visited)
    page.get_by_role("button", name=f"Fetch {best['name']}", exact=True).click()
    bar = page.get_by_label(f"Fetching {best['name']}")
    bar.wait_for()
    page.wait_for_selector(".card :text('1.0 GB of 4.0 GB, 25 %')")
    assert bar.evaluate("b => b.value / b.max") == 0.25
    fetch = page.get_by_role("button", name=f"Fetch {best['name']}", exact=True)
    assert fetch.is_disabled(), "it is being fetched"
    looked_at(page, look, "fetching")
    page.evaluate("location.hash = 'chat'")
    page.wait_for_selector(".welcome :text('1.0 GB of 4.0 GB, 25 %')")
    looked_at(page, look, "welcome-fetching")
    page.evaluate("fail()")
    page.wait_for_selector(".welcome .bad:has-text('The disk is full.')")
    assert page.get_by_role("button", name="Try again").is_visible()


def test_a_model_is_fetched_and_talked_to(visited: Server, tab: Tab, hub: FakeHub) -> None:
    few = "localStorage.setItem('millrace-settings', '{\"max_tokens\": 4}')"
    page = tab(visited, "models", script=few).page
    page.get_by_role("searchbox", name="Search models").fill("acme/tiny-fetched")
    page.get_by_role("button", name="Fetch acme/tiny-fetched").first.click()
    page.wait_for_selector("[data-model='acme/tiny-fetched']")
    page.get_by_role("button", name="Chat with acme/tiny-fetched").first.click()
    page.wait_for_selector("#top nav a[href='#chat'][aria-current]")
    until(page, "document.querySelector('.bar select').value === 'acme/tiny-fetched'")
    ask(page, "Hello.")
    answered(page, 1)
    assert page.locator(".turn.assistant .error:not([hidden])").count() == 0


def test_the_recommended_model_is_fetched_from_the_first_visit(
    visited: Server, tab: Tab, hub: FakeHub
) -> None:
    best = _recommended(visited)
    page = tab(visited).page
    page.get_by_role("button", name=f"Fetch {best['name']}").click()
    page.wait_for_selector(f".welcome p:has-text('{best['name']} is ready to use')")
    page.get_by_role("button", name=f"Use {best['name']}").click()
    until(page, "s => document.querySelector('.bar select').value === s", arg=best["source"])
    assert not page.get_by_label("About the model").is_visible()


def test_a_fetch_that_fails_says_why_and_can_be_tried_again(
    visited: Server, tab: Tab, hub: FakeHub
) -> None:
    page = tab(visited, "models").page
    page.get_by_role("searchbox", name="Search models").fill("acme/nothing-here")
    page.get_by_role("button", name="Fetch acme/nothing-here").click()
    page.wait_for_selector("p.bad:has-text('no public model')")
    assert page.get_by_role("button", name="Try again").is_visible()
    page.get_by_role("button", name="Close").click()
    page.wait_for_selector("p.bad:has-text('no public model')", state="detached")


def test_a_server_with_only_its_named_models_offers_no_fetching(served: Server, tab: Tab) -> None:
    page = tab(served, "models").page
    page.wait_for_selector("[role=status]:has-text('--only')")
    assert not page.get_by_role("searchbox", name="Search models").is_visible()
    assert page.get_by_role("button", name=re.compile("^Fetch ")).count() == 0
