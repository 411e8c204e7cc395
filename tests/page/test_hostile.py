"""What a model may say to do harm, and how much of it: nothing runs, nothing is fetched, nothing hangs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from conftest import Server

from . import hostile
from .conftest import Watched, until
from .script import ANSWER

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., Watched]
PARTS = 5
STALL = 100.0
"""Milliseconds between two frames that a reader would notice."""


def _say(page: Page, pieces: list[str], group: int = 1, pause: float = 0) -> None:
    """Have the next answer be this, and ask for it."""
    page.evaluate("([p, g, t]) => checks.answer(p, g, t)", [pieces, group, pause])
    page.get_by_label("New chat").click()
    page.get_by_label("Message", exact=True).fill("Go on.")
    page.keyboard.press("Enter")


HARM = """() => ({
  owned: globalThis.owned ?? null,
  nodes: document.querySelectorAll(
    '.turn :is(script, style, link, iframe, object, embed, form, base, meta, video, audio, template, img)'
    + ', .turn svg:not(.icon)'
  ).length,
  links: [...document.querySelectorAll('.turn a')].map(a => a.protocol)
    .filter(p => !['http:', 'https:', 'mailto:'].includes(p)),
  handlers: [...document.querySelectorAll('.turn *')].flatMap(n => n.getAttributeNames())
    .filter(n => n.startsWith('on') || n === 'style'),
  title: document.title,
})"""


@pytest.mark.parametrize("part", range(PARTS))
def test_of_two_hundred_hostile_answers_none_does_anything(
    served: Server, tab: Tab, part: int
) -> None:
    page = tab(served).page
    answers = list(enumerate(hostile.answers()))
    assert len(answers) == 200
    for number, text in answers[part::PARTS]:
        pieces = [text[at : at + 5000] for at in range(0, len(text), 5000)]
        _say(page, pieces)
        until(page, "checks.answered(1)", seconds=60)
        found = page.evaluate(HARM)
        assert found == {
            "owned": None,
            "nodes": 0,
            "links": [],
            "handlers": [],
            "title": "millrace",
        }, (
            number,
            text[:200],
        )
    assert page.locator("h1:has-text('mine')").count() == 0


def test_a_million_characters_are_all_shown(served: Server, tab: Tab) -> None:
    page = tab(served).page
    text = "word " * 200_000
    _say(page, [text[at : at + 20_000] for at in range(0, len(text), 20_000)])
    until(page, "checks.answered(1)", seconds=60)
    until(
        page,
        "document.querySelector('.turn.assistant > .text').textContent.trim().length >= 999000",
        seconds=60,
    )


def test_ten_thousand_tokens_stream_without_a_stall(served: Server, tab: Tab) -> None:
    """Printed, as is all about time; what holds on a quiet machine is in docs/page.md."""
    page = tab(served).page
    words = [w + " " for w in (ANSWER * 120).split(" ")][:10_000]
    page.evaluate("checks.frames()")
    began = time.monotonic()
    _say(page, words, group=20, pause=8)
    until(page, "checks.answered(1)", seconds=120)
    took = time.monotonic() - began
    gaps = sorted(page.evaluate("gaps"))
    late = [gap for gap in gaps if gap > STALL]
    figures = {
        "seconds": round(took, 1),
        "frames": len(gaps),
        "median_ms": round(gaps[len(gaps) // 2], 1),
        "p99_ms": round(gaps[int(len(gaps) * 0.99)], 1),
        "most_ms": round(gaps[-1], 1),
        "over_100_ms": len(late),
    }
    print(f"\nten thousand tokens: {json.dumps(figures)}")
    shown = page.locator(".turn.assistant > .text").text_content() or ""
    assert shown.count("How fast it runs") == "".join(words).count("How fast it runs")


def test_what_grows_piece_by_piece_ends_as_what_came_at_once(served: Server, tab: Tab) -> None:
    page = tab(served).page
    same = page.evaluate(
        """async (text) => {
      const { src } = document.querySelector('script[src]');
      const { MarkdownView } = await import(new URL('markdown.js', src));
      const whole = document.createElement('div'), grown = document.createElement('div');
      const first = new MarkdownView(whole), view = new MarkdownView(grown);
      first.update(text);
      for (let at = 1; at <= text.length; at++) view.update(text.slice(0, at));
      while (!first.settled || !view.settled) await new Promise(requestAnimationFrame);
      return [whole.innerHTML === grown.innerHTML, whole.innerHTML, grown.innerHTML];
    }""",
        ANSWER
        + "\n\nfoo\n***bold***\nbar\n-\n- a\n\n  b\n- c\n\n| a |\n|--|\n| b |\n\nHead\n===\n",
    )
    assert same[0], (same[1], same[2])
