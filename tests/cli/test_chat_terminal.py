"""`millrace chat` in a real terminal: pastes are one message, and Markdown is shown as what it is."""

from __future__ import annotations

import ctypes.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.fake_server import Fake, chunk, playing
from cli.terminals import Typist
from rich.console import Console

from millrace.cli import typed
from millrace.cli.answer_display import MarkdownAnswer, finished

PASTE = "\x1b[200~def f():\r    return 1\r/quit is no command here\x1b[201~"
PASTED = "def f():\n    return 1\n/quit is no command here"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with playing() as server:
        yield server


def _talk(fake: Fake, home: Path, env: dict[str, str] | None = None) -> str:
    """A paste with a word typed behind it, a question, and the end."""
    address = fake.url.removeprefix("http://")
    typist = Typist(["chat", "--url", address], {"MILLRACE_HOME": str(home)} | (env or {}))
    at = typist.wait_for("› ")
    typist.type(PASTE)
    typist.wait_for("command here", at)
    typist.type(" and more\r")
    at = typist.wait_for("first token after", at)
    at = typist.wait_for("› ", at)
    typist.type("And?\r")
    at = typist.wait_for("first token after", at)
    typist.wait_for("› ", at)
    typist.type("\x04")
    assert typist.end() == 0, typist.shown
    return typist.shown


def _answers_in_markdown(fake: Fake) -> None:
    fake.script = [
        chunk(content="# Head\n\nSome **bo"),
        chunk(content="ld** words.\n\n<b>tag</b>\n\x1b[2J"),
        chunk(finish="stop"),
    ]


def test_what_is_pasted_is_one_message_and_answers_are_rendered(fake: Fake, tmp_path: Path) -> None:
    _answers_in_markdown(fake)
    shown = _talk(fake, tmp_path)
    first, second = (asked["messages"] for asked in fake.asked)
    assert first == [{"role": "user", "content": PASTED + " and more"}]
    assert second[-1] == {"role": "user", "content": "And?"}
    assert "\x1b[1mbold" in shown and "**" not in shown.rsplit("Some", 1)[1]
    assert "<b>tag</b>" in shown and "\x1b[2J" not in shown
    assert (tmp_path / "chat_history").read_text() == "And?\n"


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not ctypes.util.find_library("edit"),
    reason="there is no libedit to put in readline's place",
)
def test_the_editor_of_macs_has_pastes_too(fake: Fake, tmp_path: Path) -> None:
    edit = ctypes.util.find_library("edit")
    assert edit is not None
    shown = _talk(fake, tmp_path, {"LD_PRELOAD": edit})
    assert typed.BEGIN in shown, "this was GNU's readline after all"
    assert fake.asked[0]["messages"] == [{"role": "user", "content": PASTED + " and more"}]
    assert fake.asked[1]["messages"][-1] == {"role": "user", "content": "And?"}


def test_only_the_last_block_can_change() -> None:
    assert finished("one\ntwo") == ("", "one\ntwo")
    assert finished("one\n\n- a\n- b\n\n  c") == ("one\n\n", "- a\n- b\n\n  c")
    assert finished("```py\nx = 1\n\ny = 2") == ("", "```py\nx = 1\n\ny = 2")
    assert finished("| a |\n|---|\n| 1 |\n\nend") == ("| a |\n|---|\n| 1 |\n\n", "end")
    assert finished("a\u2028b\n\n# c\u2028d") == ("a\u2028b\n\n", "# c\u2028d")
    assert finished("") == ("", "")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_answers_look_the_same_however_they_come(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# One\n\nA *b* [c](http://d.example)\nline\n\n```py\nx = 1\n```\n\n1. a\n2. b\n\n<hr>\n\nend"
    monkeypatch.setattr("millrace.cli.answer_display._EVERY", 0.0)
    out = Console(file=io.StringIO(), width=60, force_terminal=False)
    answer = MarkdownAnswer(out)
    for at in range(0, len(text), size):
        answer.say(text[at : at + size])
    answer.end()
    lines = [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    for line in ("A b c (http://d.example)", "line", " x = 1", " 1 a", " 2 b", "<hr>", "end"):
        assert line in lines, lines
    assert lines.index("end") == len(lines) - 1


def test_thoughts_come_before_the_answer_and_between_its_parts() -> None:
    out = Console(file=io.StringIO(), width=60, force_terminal=False)
    answer = MarkdownAnswer(out)
    for piece, kind in (("hm", "think"), ("one", "say"), ("so", "think"), ("two", "say")):
        getattr(answer, kind)(piece)
    answer.end()
    assert out.file.getvalue().split() == ["hm", "one", "so", "two"]  # type: ignore[attr-defined]
