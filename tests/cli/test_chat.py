"""The conversation is pure; the rest is tried against a small server that streams a script."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from cli.fake_server import Fake, chunk, playing
from rich.console import Console

from millrace.cli import chat, remote
from millrace.cli.conversation import HELP, Event, ReplyUsage, SavedConversation, figures, printable
from millrace.errors import EngineUnavailable, RequestFailed, SetupError


def turns(conversation: SavedConversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


def talked() -> SavedConversation:
    conversation = SavedConversation()
    for question, answer in (("one?", "1"), ("two?", "2")):
        conversation.ask(question)
        conversation.answer(answer)
    return conversation


def test_payload_holds_what_was_set_and_nothing_else() -> None:
    conversation = SavedConversation(system="Be brief.", top_p=0.5)
    conversation.ask("hi")
    assert conversation.payload("m") == {
        "model": "m",
        "top_p": 0.5,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "model" not in SavedConversation().payload(None)


def test_conversations_share_nothing() -> None:
    SavedConversation().ask("mine")
    assert SavedConversation().messages == []


def test_a_question_without_answer_is_replaced() -> None:
    conversation = SavedConversation()
    conversation.ask("lost")
    conversation.ask("kept")
    assert turns(conversation) == [("user", "kept")]


def test_undo_and_retry() -> None:
    conversation = talked()
    assert conversation.command("/retry").action == "ask"
    assert turns(conversation) == [("user", "one?"), ("assistant", "1"), ("user", "two?")]
    conversation.command("/undo")
    assert turns(conversation) == [("user", "one?"), ("assistant", "1")]
    conversation.command("/undo")
    assert conversation.command("/undo").text == "Nothing to undo."
    assert conversation.command("/retry").action == "none"


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("/temp 0.3", "temperature", 0.3),
        ("/top_p 0.9", "top_p", 0.9),
        ("/max 12", "max_tokens", 12),
        ("/system You are a cat. ", "system", "You are a cat."),
    ],
)
def test_settings(line: str, field: str, value: object) -> None:
    conversation = SavedConversation()
    assert conversation.command(line).text
    assert getattr(conversation, field) == value
    conversation.command(line.split()[0])
    assert getattr(conversation, field) is None


@pytest.mark.parametrize("line", ["/temp hot", "/temp -1", "/temp nan", "/top_p 2", "/max 1.5"])
def test_bad_settings_change_nothing(line: str) -> None:
    conversation = SavedConversation()
    assert line.split()[0] in conversation.command(line).text
    assert conversation == SavedConversation()


def test_every_command_of_the_help_is_known() -> None:
    names = [word for word in HELP.split() if word.startswith("/") and word[1:].isidentifier()]
    assert len(set(names)) == 13
    for name in names:
        assert "no command" not in talked().command(f"{name} 1").text
    assert max(map(len, HELP.splitlines())) < 80, "it fits a plain terminal"
    assert "no command /nonsense" in talked().command("/nonsense").text
    assert talked().command("/save").action == "none"


def test_printable_keeps_text_and_drops_control() -> None:
    assert printable("a\x1b[31mb\r\x9b\x00") == "a[31mb"
    assert printable("é\u00a0👩\u200d🚀\n\t") == "é\u00a0👩\u200d🚀\n\t"


def test_figures() -> None:
    line = figures(ReplyUsage(10, 21), wait=0.5, run=2.0, finish="length")
    assert "21 tokens, 10.0 tokens/s" in line
    assert "0.50 s" in line and "prompt 10" in line and "limit" in line
    assert "tokens/s" not in figures(ReplyUsage(), wait=0.5, run=2.0, finish="stopped")


@pytest.fixture
def fake() -> Iterator[Fake]:
    with playing() as server:
        yield server


Talk = Callable[..., tuple[str, SavedConversation]]


@pytest.fixture
def talk(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Types lines into a terminal; an exception among them is what `input` raises."""

    def run(*lines: str | type[BaseException], tty: bool = True) -> tuple[str, SavedConversation]:
        typed = iter(lines)

        def read(_: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        shown = Console(file=io.StringIO(), width=200)
        terminal = chat.Terminal(remote.Server(fake.url, model="fake"), SavedConversation(), shown)
        terminal.interactive = tty
        terminal.run()
        return shown.file.getvalue(), terminal.conversation  # type: ignore[attr-defined]

    return run


def test_answers_stream_and_are_remembered(fake: Fake, talk: Talk) -> None:
    shown, conversation = talk("Hello", "", "Again", "/tokens")
    assert "hmm\n\nBonjour é\n3 tokens" in shown
    assert "14 tokens read and 6 made" in shown
    assert turns(conversation)[:2] == [("user", "Hello"), ("assistant", "Bonjour é")]
    assert [m["content"] for m in fake.asked[1]["messages"]] == ["Hello", "Bonjour é", "Again"]


def test_without_a_terminal_only_answers_are_printed(talk: Talk) -> None:
    assert talk("Hello", tty=False)[0] == "Bonjour é\n"


def test_lines_can_be_continued(fake: Fake, talk: Talk) -> None:
    talk("one\\", "two")
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_ctrl_c_keeps_the_partial_answer(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: object) -> Iterator[Event]:
        yield msgspec.convert(chunk(content="half"), Event)
        raise KeyboardInterrupt

    monkeypatch.setattr(remote.Server, "stream", stream)
    shown, conversation = talk("Hello", KeyboardInterrupt)
    assert turns(conversation) == [("user", "Hello"), ("assistant", "half")]
    assert "stopped" in shown and "Ctrl-D leaves" in shown


def test_the_tokens_of_a_stopped_answer_are_counted_where_the_server_reports_them(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: dict[str, int] | None = {"prompt_tokens": 7, "completion_tokens": 1}

    def stream(*_: object) -> Iterator[Event]:
        yield msgspec.convert(chunk(content="half") | {"usage": usage}, Event)
        raise KeyboardInterrupt

    monkeypatch.setattr(remote.Server, "stream", stream)
    shown, _ = talk("Hello", "/tokens")
    assert "7 tokens read and 1 made in this session.\n" in shown
    usage = None
    shown, _ = talk("Hello", "/tokens")
    assert "0 tokens read and 0 made in this session. Answers that were stopped" in shown
    assert "and are not counted: 1." in shown


def test_save_and_load(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    _, first = talk("/temp 0.5", "Hello", f"/save {path}")
    shown, second = talk(f"/load {path}")
    assert second == first
    assert "2 messages" in shown
    path.write_text("[1, 2")
    assert "not a saved conversation" in talk(f"/load {path}")[0]
    assert "cannot be used" in talk(f"/load {tmp_path / 'none'}")[0]


def test_refusals_are_shown_as_a_sentence(fake: Fake, talk: Talk) -> None:
    fake.refusal = (400, b'{"error": {"message": "The prompt is too long.", "code": "x"}}')
    shown, conversation = talk("Hello", "Hello again", "/quit", "unread")
    assert shown.count("error: The prompt is too long.") == 2
    assert turns(conversation) == [("user", "Hello again")]
    with pytest.raises(RequestFailed, match="too long"):
        talk("Hello", tty=False)


def test_an_error_in_the_stream_keeps_what_came(fake: Fake, talk: Talk) -> None:
    fake.script = [chunk(content="Bon"), {"error": {"message": "The engine died."}}]
    shown, conversation = talk("Hello")
    assert "error: The engine died." in shown
    assert turns(conversation)[-1] == ("assistant", "Bon")


def test_an_event_that_is_no_json(fake: Fake, talk: Talk) -> None:
    fake.script = ["data: {oops"]
    assert "not JSON" in talk("Hello")[0]


def test_model_command(talk: Talk, fake: Fake) -> None:
    shown, _ = talk("/model other", "/model fake", "Hello")
    assert "error: " in shown and "has no model 'other'. Models served: fake" in shown
    assert "fake (served: fake)" in shown
    assert fake.asked[0]["model"] == "fake"


def test_nobody_answers() -> None:
    with pytest.raises(EngineUnavailable, match="millrace serve"):
        remote.Server("http://127.0.0.1:9").models()
    assert remote.Server("http://127.0.0.1:9").health() is None


def test_our_own_server_that_fails_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(note=None)
    monkeypatch.setattr("millrace.models.resolve.resolve", lambda *_, **__: found)
    with (
        pytest.raises(SetupError, match="no model 'not-a-model'"),
        remote.own_server("not-a-model"),
    ):
        pytest.fail("it cannot have started")


def test_the_command_in_a_pipe(fake: Fake) -> None:
    code = (
        "import typer; from millrace.cli import chat; app = typer.Typer();"
        "chat.register(app); app(standalone_mode=False)"
    )
    options = ["chat", "--url", fake.url + "/v1", "--system", "Be brief.", "--api-key", "k"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "--temperature", "0", "--max-tokens", "9"],
        input="Hello\n/quit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "Bonjour é\n"), done.stderr
    (asked,) = fake.asked
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("fake", 0.0, 9)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert fake.keys == ["Bearer k"]


def test_an_address_needs_no_scheme_and_a_wrong_model_is_told_at_once(fake: Fake) -> None:
    with chat._connect(None, fake.url.removeprefix("http://"), None) as server:
        assert (server.url, server.model) == (fake.url, "fake")
    with (
        pytest.raises(SetupError, match="no model 'other'. Models served: fake"),
        chat._connect("other", fake.url, None),
    ):
        pytest.fail("it has no such model")


def test_a_picture_goes_with_the_next_question_and_with_no_other(
    talk: Talk, fake: Fake, tmp_path: Path
) -> None:
    picture, text = tmp_path / "a b.png", tmp_path / "note.txt"
    picture.write_bytes(b"\x89PNG rest")
    text.write_text("hi")
    shown, kept = talk(
        f"/image {picture}", f"/image {text}", "/image nowhere", "What is it?", "And?"
    )
    assert "a b.png goes with your next question" in shown
    assert "is no PNG" in shown and "nowhere cannot be used" in shown
    first, _, second = fake.asked[-1]["messages"]
    assert first["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert first["content"][1] == {"type": "text", "text": "What is it?"}
    assert second == {"role": "user", "content": "And?"}
    assert msgspec.json.decode(msgspec.json.encode(kept), type=SavedConversation) == kept
