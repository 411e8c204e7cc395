"""Conversations in the page: renamed, scrolled, with the time of a thought, and with prompt presets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Server

from .conftest import Watched, answered, ask, until
from .looks import LOOKS, is_narrow, looked_at

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., Watched]


def _titles(page: Page) -> list[str]:
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('.talks li > button:not(.sign)')].map((b) => b.title)"
    )
    return found


@pytest.mark.parametrize("look", LOOKS)
def test_a_conversation_is_renamed(served: Server, tab: Tab, look: dict[str, Any]) -> None:
    page = tab(served, **look).page
    for text in ("The first one.", "The second one."):
        page.keyboard.press("Control+Shift+O")
        ask(page, text)
        answered(page, 1)
    if is_narrow(look):
        page.locator(".bar .drawer").click()
    until(page, "document.querySelectorAll('.talks li > button:not(.sign)').length === 2")
    page.get_by_label("Rename The first one.").click()
    field = page.get_by_label("Title of the conversation")
    assert field.input_value() == "The first one."
    field.fill("Water wheels")
    looked_at(page, look, "rename")
    field.press("Enter")
    until(
        page,
        "document.querySelector('.talks li > button:not(.sign)[title=\"Water wheels\"]') !== null",
    )
    assert _titles(page) == ["The second one.", "Water wheels"], "its place in the list stays"
    page.get_by_label("Rename Water wheels").click()
    field.fill("Not this")
    field.press("Escape")
    page.get_by_label("Rename Water wheels").click()
    field.fill("  ")
    field.press("Enter")
    until(page, "document.querySelector('.talks li input') === null")
    assert _titles(page) == ["The second one.", "Water wheels"]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    until(page, "document.querySelectorAll('.talks li > button:not(.sign)').length === 2")
    assert _titles(page) == ["The second one.", "Water wheels"], "it is kept"


def test_a_conversation_is_renamed_while_its_answer_comes_and_in_another_tab(
    served: Server, tab: Tab
) -> None:
    page = tab(served).page
    ask(page, "Say something long.")
    shown = "document.querySelector('.turn.assistant .text:not(.thought *)')?.textContent"
    until(page, f"{shown}.length > 50")
    other = page.context.new_page()
    other.goto(served.url)
    other.get_by_label("Rename Say something long.").click()
    other.get_by_label("Title of the conversation").fill("Renamed elsewhere")
    other.get_by_label("Title of the conversation").press("Enter")
    until(page, "document.querySelector('[title=\"Renamed elsewhere\"]') !== null")
    page.locator("body").press("Escape")
    answered(page, 1)
    page.reload()
    until(page, "document.querySelector('[title=\"Renamed elsewhere\"]') !== null")
    assert _titles(page) == ["Renamed elsewhere"], "the running answer did not write the old one"


PIECES = ["The wheel turns and the water runs. " * 4 + "\n\n"] * 400


@pytest.mark.parametrize("look", LOOKS)
def test_a_button_leads_to_the_latest_words(served: Server, tab: Tab, look: dict[str, Any]) -> None:
    page = tab(served, **look).page
    page.evaluate("pieces => checks.answer(pieces, 2, 40)", PIECES)
    ask(page, "Go on and on.")
    until(page, "s => document.querySelector(s).scrollHeight > 1500", arg=".scroll")
    jump = page.get_by_role("button", name="Jump to latest")
    assert not jump.is_visible(), "the reader is at the end"
    page.evaluate("document.querySelector('.scroll').scrollTop = 0")
    jump.wait_for()
    page.wait_for_timeout(300)
    assert page.evaluate("document.querySelector('.scroll').scrollTop") == 0, "reading goes on"
    looked_at(page, look, "jump")
    jump.click()
    jump.wait_for(state="hidden")
    before = page.evaluate("document.querySelector('.scroll').scrollTop")
    assert before > 300
    page.wait_for_timeout(300)
    assert page.evaluate("document.querySelector('.scroll').scrollTop") > before, "and follows"
    page.evaluate("document.querySelector('.scroll').scrollTop = 0")
    jump.wait_for()
    page.keyboard.press("Escape")
    answered(page, 1)
    assert jump.is_visible(), "also once the answer is whole"
    page.keyboard.press("Control+Shift+O")
    jump.wait_for(state="hidden")


THINKING = """
(() => {
  const real = globalThis.fetch;
  globalThis.fetch = (path, options) => {
    if (path !== "/v1/chat/completions") return real(path, options);
    const chunk = (delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta }] })}\\n\\n`;
    const encoder = new TextEncoder(), wait = (ms) => new Promise((wake) => setTimeout(wake, ms));
    const body = new ReadableStream({ async start(control) {
      const put = (text) => control.enqueue(encoder.encode(text));
      put(chunk({ reasoning_content: "Let me see." }));
      await wait(1500);
      put(chunk({ content: "It is so." }));
      await wait(1500);
      put(chunk({ content: " Truly." }) + "data: [DONE]\\n\\n");
      control.close();
    } });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
})()
"""


@pytest.mark.parametrize("look", LOOKS)
def test_a_thought_says_how_long_it_took(served: Server, tab: Tab, look: dict[str, Any]) -> None:
    page = tab(served, **look).page
    page.evaluate(THINKING)
    ask(page, "Is it so?")
    summary = page.locator(".turn.assistant details.thought summary")
    until(page, "document.querySelector('.thought summary')?.textContent === 'Thinking…'")
    answered(page, 1)
    match = re.fullmatch(r"Thought for (\d+(?:\.\d)?) s", summary.inner_text())
    assert match is not None, summary.inner_text()
    # Up to the first word of the answer, during which no token of the thought came.
    assert 1.4 <= float(match[1]) < 30
    looked_at(page, look, "thought")
    shown = summary.inner_text()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    if is_narrow(look):
        page.locator(".bar .drawer").click()
    page.locator(".talks li > button").first.click()
    answered(page, 1)
    assert summary.inner_text() == shown, "it is kept with the answer"


def test_a_short_thought_has_a_duration_too(served: Server, tab: Tab) -> None:
    page = tab(served).page
    ask(page, "Tell me about mills.")
    answered(page, 1)
    text = page.locator(".turn.assistant details.thought summary").inner_text()
    assert re.fullmatch(r"Thought for \d+(\.\d)? s", text), text


def _settings(page: Page) -> None:
    page.locator(".composer .sign.big").nth(1).click()
    page.wait_for_selector("dialog[open] form")


def _kept(page: Page) -> None:
    page.locator("dialog[open] > form > footer button.main").click()
    page.wait_for_selector("dialog", state="detached")


def _save(page: Page, prompt: str, name: str) -> None:
    page.get_by_label("System prompt").fill(prompt)
    page.get_by_role("button", name="Save as preset").click()
    page.get_by_label("Name of the preset").fill(name)
    page.get_by_label("Name of the preset").press("Enter")


@pytest.mark.parametrize("look", LOOKS)
def test_prompt_presets_are_saved_chosen_renamed_and_deleted(
    served: Server, tab: Tab, look: dict[str, Any]
) -> None:
    page = tab(served, **look).page
    _settings(page)
    picker, system = page.get_by_label("Prompt preset"), page.get_by_label("System prompt")
    names = (
        "[...document.querySelector('[aria-label=\"Prompt preset\"]').options].map((o) => o.text)"
    )
    page.get_by_role("button", name="Save as preset").click()
    page.get_by_role("button", name="Save preset").click()
    page.wait_for_selector("dialog .bad:has-text('Give the preset a name.')")
    page.get_by_label("Name of the preset").fill("Empty")
    page.get_by_role("button", name="Save preset").click()
    page.wait_for_selector("dialog .bad:has-text('Write a system prompt first.')")
    page.get_by_label("Name of the preset").press("Escape")
    assert page.locator("dialog[open]").count() == 1, "Escape ends the question, not the settings"
    _save(page, "Answer like a pirate.", "Pirate")
    _save(page, "Answer in one word.", "Brief")
    looked_at(page, look, "presets")
    assert page.evaluate(names) == ["No preset", "Brief", "Pirate"]
    assert picker.input_value() == "Brief"
    picker.select_option("Pirate")
    assert system.input_value() == "Answer like a pirate."
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the preset").fill("Brief")
    page.get_by_role("button", name="Rename preset").click()
    page.wait_for_selector("dialog .bad:has-text('already')")
    page.get_by_label("Name of the preset").fill("Sailor <b>")
    page.get_by_role("button", name="Rename preset").click()
    assert page.evaluate(names) == ["No preset", "Brief", "Sailor <b>"]
    _save(page, "Answer like an old sailor.", "Sailor <b>")
    page.wait_for_selector("dialog :text('now has this prompt')")
    _kept(page)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    _settings(page)
    assert picker.input_value() == "Sailor <b>", "presets and the choice are kept"
    picker.select_option("Brief")
    page.get_by_role("button", name="Delete preset").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_selector("dialog :text('is deleted')")
    assert page.evaluate(names) == ["No preset", "Sailor <b>"]
    picker.select_option("Sailor <b>")
    _kept(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello.")
    first = sent.value.post_data_json["messages"][0]
    assert first == {"role": "system", "content": "Answer like an old sailor."}
    answered(page, 1)


def test_presets_that_are_none_are_left_out(served: Server, tab: Tab) -> None:
    kept = '[{"name": 1}, "x", {"name": "Good", "text": "Be good."}, {"name": "", "text": "a"}]'
    for value, expected in ((kept, ["No preset", "Good"]), ("{broken", ["No presets yet"])):
        page = tab(served, script=f"localStorage.setItem('millrace-presets', `{value}`)").page
        _settings(page)
        picker = page.get_by_label("Prompt preset")
        picker.wait_for()
        assert picker.locator("option").all_inner_texts() == expected


def test_a_preset_that_another_tab_deleted_is_said_to_be_gone(served: Server, tab: Tab) -> None:
    watched = tab(served)
    page = watched.page
    _settings(page)
    picker, system = page.get_by_label("Prompt preset"), page.get_by_label("System prompt")
    for action in ("Rename", "choose", "Delete preset"):
        _save(page, "Answer like a pirate.", "Pirate")
        _save(page, "Answer in one word.", "Brief")
        page.evaluate("localStorage.setItem('millrace-presets', '[]')")
        if action == "choose":
            picker.select_option("Pirate")
        else:
            page.get_by_role("button", name=action, exact=True).click()
        if action == "Delete preset":
            page.get_by_role("button", name="Delete", exact=True).click()
            page.wait_for_selector("dialog :text('“Brief” is deleted.')")
        else:
            page.wait_for_selector("dialog :text('was deleted in another tab')")
        assert picker.locator("option").all_inner_texts() == ["No presets yet"], action
        assert system.input_value() == "Answer in one word.", "what is written stays"


def test_a_browser_that_stores_no_more_is_said_to_keep_no_preset(served: Server, tab: Tab) -> None:
    full = """
    const set = Storage.prototype.setItem;
    Storage.prototype.setItem = function (name, value) {
      if (name === "millrace-presets") throw new DOMException("full", "QuotaExceededError");
      return set.call(this, name, value);
    };"""
    page = tab(served, script=full).page
    _settings(page)
    _save(page, "Answer like a pirate.", "Pirate")
    page.wait_for_selector("dialog :text('until this tab is closed')")
    assert page.get_by_label("Prompt preset").input_value() == "Pirate"
