"""The limits of answers on the page: sent with every question, reported where they end an answer."""

from __future__ import annotations

from collections.abc import Callable

from conftest import Server

from .conftest import Watched, answered, ask, picture

Tab = Callable[..., Watched]


def test_an_answer_that_repeats_itself_ends_with_a_sentence(served: Server, tab: Tab) -> None:
    page = tab(served).page
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Sing in circles")
    body = sent.value.post_data_json
    assert (body["max_tokens"], body["loop_guard"]) == (4096, True)
    answered(page, 1)
    notice = page.locator(".turn.assistant .notice")
    assert "repeated itself" in notice.inner_text()
    assert page.locator(".turn.assistant .text").last.inner_text().count("round and round") < 100
    picture(page, "loop")


def test_an_answer_at_the_limit_says_how_to_go_on(served: Server, tab: Tab) -> None:
    page = tab(served).page
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label("Max tokens", exact=True)
    assert field.get_attribute("placeholder") == "4,096", "the default is shown"
    field.fill("12")
    page.get_by_role("button", name="Save", exact=True).click()
    ask(page, "Tell me a long story")
    answered(page, 1)
    notice = page.locator(".turn.assistant .notice")
    assert "limit of 12 tokens" in notice.inner_text() and "go on" in notice.inner_text()
    picture(page, "limit")
    page.reload()
    page.locator(".talks li button").first.click()
    page.wait_for_selector(".turn.assistant .notice:has-text('limit of 12 tokens')")


def test_an_answer_that_ended_by_itself_has_no_notice(served: Server, tab: Tab) -> None:
    page = tab(served).page
    ask(page, "Hello")
    answered(page, 1)
    assert page.locator(".turn.assistant .notice:not([hidden])").count() == 0
