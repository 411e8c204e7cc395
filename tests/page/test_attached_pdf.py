"""A PDF that is attached to a message: its text goes along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pdfs
import pytest
from conftest import Server

from .conftest import Watched, answered, ask
from .looks import LOOKS, looked_at

Tab = Callable[..., Watched]


@pytest.mark.parametrize("look", LOOKS)
def test_the_text_of_a_pdf_goes_along_with_the_message(
    served: Server, tab: Tab, tmp_path: Path, look: dict[str, Any]
) -> None:
    file = tmp_path / "The wheel.pdf"
    file.write_bytes(pdfs.pdf(["The wheel is five metres wide.", "It was built in 1790."]))
    page = tab(served, **look).page
    page.locator(".composer input[type=file]").set_input_files([file])
    page.wait_for_selector(".composer .file:has-text('The wheel.pdf') button")
    looked_at(page, look, "pdf")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "How wide is it?")
    text = sent.value.post_data_json["messages"][-1]["content"]
    assert text.startswith("The wheel.pdf:\n```\nThe wheel is five metres wide.\n\nIt was built in")
    assert text.endswith("```\n\nHow wide is it?")
    answered(page, 1)
    assert "The wheel.pdf" in page.locator(".turn.user").inner_text()


def test_a_pdf_that_cannot_be_read_is_refused_with_the_reason(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    page = tab(served).page
    for name, content, reason in (
        ("locked.pdf", pdfs.locked(), "password"),
        ("scan.pdf", pdfs.without_text(), "pictures"),
        ("none.pdf", b"no such thing", "not a PDF"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        page.locator(".composer input[type=file]").set_input_files([file])
        page.wait_for_selector(f".toast:has-text('{name}'):has-text('{reason}')")
    assert page.locator(".composer .file").count() == 0


def test_a_message_waits_for_a_pdf_that_is_being_read(
    served: Server, tab: Tab, tmp_path: Path
) -> None:
    file = tmp_path / "late.pdf"
    file.write_bytes(pdfs.pdf(["Late."]))
    page = tab(served).page
    held: list[Any] = []
    page.route("**/v1/files/text", lambda route: held.append(route))
    page.locator(".composer input[type=file]").set_input_files([file])
    page.wait_for_selector(".composer .file:has-text('reading')")
    ask(page, "What does it say?")
    page.wait_for_selector(".toast:has-text('late.pdf is still being read')")
    assert page.locator(".turn").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "What does it say?"
    held[0].continue_()
    page.wait_for_selector(".composer .file:has-text('late.pdf') button")
    page.get_by_label("Message", exact=True).press("Enter")
    answered(page, 1)
