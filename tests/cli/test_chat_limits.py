"""The limits of answers in `millrace chat`: sent to servers of this kind, and reported when one applies."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cli.fake_server import Fake, chunk, playing
from rich.console import Console

from millrace.cli import chat, remote
from millrace.cli.chat_limits import DEFAULT_MAX_TOKENS, ChatLimits, limits_for
from millrace.cli.conversation import SavedConversation
from millrace.cli.remote import RemoteModel

OURS = {"id": "fake", "owned_by": "millrace"}
LOOPED: list[Any] = [
    chunk(content="la la la"),
    {
        "choices": [
            {
                "index": 0,
                "delta": {},
                "finish_reason": "stop",
                "finish_details": {"type": "loop", "period": 1, "tokens": 257},
            }
        ]
    },
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 257, "total_tokens": 264}},
]


def _cut(tokens: int) -> list[Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
    return [chunk(content="Once"), chunk(finish="length"), {"choices": [], "usage": usage}]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with playing() as server:
        server.models = [OURS]
        yield server


def _chat(fake: Fake, *options: str, said: str = "hi\n") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millrace", "chat", "--url", fake.url, *options]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=60)


def test_both_are_on_by_default_and_can_be_changed(fake: Fake) -> None:
    _chat(fake, said="one\n/max 9\ntwo\n/max 0\nthree\n/max\nfour\n")
    sent = [(body.get("max_tokens"), body.get("loop_guard")) for body in fake.asked]
    assert sent == [(4096, True), (9, True), (None, True), (4096, True)]
    counted = {"include_usage": True, "continuous_usage_stats": True}
    assert all(body["stream_options"] == counted for body in fake.asked)
    fake.asked.clear()
    _chat(fake, "--max-tokens", "7", "--no-loop-guard")
    _chat(fake, "--max-tokens", "0")
    sent = [(body.get("max_tokens"), body.get("loop_guard")) for body in fake.asked]
    assert sent == [(7, False), (None, True)]
    assert DEFAULT_MAX_TOKENS == 4096


def test_other_servers_are_sent_only_what_was_asked_for(fake: Fake) -> None:
    fake.models = [{"id": "fake"}]
    _chat(fake)
    assert not {"max_tokens", "loop_guard"} & set(fake.asked[0])
    assert fake.asked[0]["stream_options"] == {"include_usage": True}
    _chat(fake, "--max-tokens", "7", "--loop-guard")
    assert (fake.asked[1]["max_tokens"], fake.asked[1]["loop_guard"]) == (7, True)


def test_what_the_servers_configuration_sets_is_left_to_it() -> None:
    def limits(**profile: Any) -> ChatLimits:
        card = RemoteModel(id="m", owned_by="millrace", profile=profile)
        return limits_for([RemoteModel(id="other"), card], "m", None)

    assert limits() == ChatLimits(4096, True, True)
    assert limits(max_tokens=100) == ChatLimits(None, True, True)
    assert limits(loop_guard=False) == ChatLimits(4096, None, True)


def test_an_answer_that_was_ended_says_why_and_how_to_go_on(fake: Fake) -> None:
    for script, word in ((LOOPED, "repeated itself"), (_cut(4096), "limit of 4096 tokens")):
        fake.script = script
        done = _chat(fake)
        assert done.returncode == 0
        assert word in done.stderr and word not in done.stdout, "the answer alone is the output"
    fake.script = _cut(50)
    assert "limit of" not in _chat(fake).stderr, "the window was full"


def test_in_a_terminal_it_is_under_the_answer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.script = _cut(12)
    typed = iter(["hi"])

    def read(_: str) -> str:
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    shown = Console(file=io.StringIO(), width=200)
    server = remote.Server(fake.url, model="fake")
    limits = ChatLimits(4096, True)
    terminal = chat.Terminal(server, SavedConversation(max_tokens=12), shown, limits=limits)
    terminal.interactive = True
    terminal.run()
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "limit of 12 tokens" in text and "go on" in text and "/max" in text
