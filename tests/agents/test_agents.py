"""Real coding agents as clients: each answers, runs its own tools, and goes on where it was.

Run by `make test-agents`, not with the other tests: the agents are large programs from the npm
registry. The model is scripted; all else, from the agent's prompt to its tool's result, is real.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import scripted
from agents import AGENTS, MODEL, WINDOW, Agent
from conftest import Server
from recorder import Recorder
from scripted import Rule, Style, call, think

pytestmark = [
    pytest.mark.skipif("MILLRACE_AGENTS" not in os.environ, reason="run `make test-agents`"),
    pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.name),
]
HELLO = "Hello from the script."
# Written so that the word is in the command's output and not in the command.
COMMAND = "echo COPPER-$((6*7)) | tee -a proof.txt"
NOTE = "TIN-50 is the word.\n"
STYLES: tuple[Style, ...] = ("hermes", "thinking", "harmony")


class Stage:
    """One server per style, and for each agent a home, a folder and a recorder of its own."""

    def __init__(self, folder: Path, default_model: Path) -> None:
        self._folder = folder
        self._default = default_model
        self._servers: dict[Style, Server] = {}
        self._recorders: list[Recorder] = []

    def set(
        self, kind: type[Agent], style: Style = "hermes", place: str = ""
    ) -> tuple[Agent, Recorder]:
        """`place` is one of its own; what an agent did elsewhere, it does not find there."""
        recorder = Recorder(self.server(style).url)
        self._recorders.append(recorder)
        folder = self._folder / (place or style) / kind.name
        return kind(recorder.url, folder / "home", folder / "work"), recorder

    def server(self, style: Style) -> Server:
        if style not in self._servers:
            model = self._folder / style / "model"
            scripted.make(model, self._default, self._rules(style), style, WINDOW)
            server = Server(str(model), "--trust-remote-code", "--name", MODEL)
            self._servers[style] = server.wait_ready()
        return self._servers[style]

    def _rules(self, style: Style) -> list[Rule]:
        def thoughtful(say: str) -> str:
            return say if style == "hermes" else think("Let me see.", say, style)

        rules = [
            Rule("COPPER-42", thoughtful("The command printed COPPER-42.")),
            Rule("TIN-50", thoughtful("The note says TIN-50.")),
        ]
        for kind in AGENTS:
            agent = kind("", Path(), self._folder / style / kind.name / "work")
            shell = call(kind.shell, style, **agent.shell_call(COMMAND))
            rules.append(Rule(f"use {kind.name} shell", thoughtful(shell)))
            rules.append(Rule(f"use {kind.name} twice", f"Two at once.\n{shell}\n{shell}"))
            for name, (tool, arguments) in agent.file_tools(agent.work / "note.txt", NOTE).items():
                said = thoughtful(call(tool, style, **arguments))
                rules.append(Rule(f"use {kind.name} {name}", said))
        ended = "to=assistant" if style == "harmony" else "<tool_response>"
        return [*rules, Rule(ended, thoughtful("It is done.")), Rule("", thoughtful(HELLO))]

    def clear(self) -> None:
        for recorder in self._recorders:
            recorder.stop()
        for server in self._servers.values():
            server.stop()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("agents"), default_model)
    yield stage
    stage.clear()


def _ran(agent: Agent, recorder: Recorder, prompt: str, *, follow_up: bool = False) -> str:
    answer = agent.run(prompt, follow_up=follow_up)
    assert recorder.troubles == []
    assert answer.code == 0, answer.log
    return answer.text


@pytest.mark.parametrize("style", STYLES)
def test_answers_with_text(stage: Stage, kind: type[Agent], style: Style) -> None:
    agent, recorder = stage.set(kind, style)
    assert _ran(agent, recorder, "say hi") == HELLO
    assert len(recorder.generations()) == 1
    assert all(e.done for e in recorder.exchanges)


@pytest.mark.parametrize("style", STYLES)
def test_runs_a_command(stage: Stage, kind: type[Agent], style: Style) -> None:
    agent, recorder = stage.set(kind, style)
    proof = agent.work / "proof.txt"
    proof.unlink(missing_ok=True)
    said = _ran(agent, recorder, f"use {kind.name} shell")
    assert said.endswith("The command printed COPPER-42.")
    assert proof.read_text() == "COPPER-42\n"
    assert len(recorder.generations()) == 2


def test_runs_two_calls_of_one_answer(stage: Stage, kind: type[Agent]) -> None:
    agent, recorder = stage.set(kind)
    proof = agent.work / "proof.txt"
    proof.unlink(missing_ok=True)
    said = _ran(agent, recorder, f"use {kind.name} twice")
    assert said.endswith("The command printed COPPER-42.")
    assert proof.read_text() == "COPPER-42\n" * 2
    assert len(recorder.generations()) == 2


def test_reads_and_writes_files(stage: Stage, kind: type[Agent]) -> None:
    agent, recorder = stage.set(kind)
    note = agent.work / "note.txt"
    if not agent.file_tools(note, NOTE):
        pytest.skip("this agent reads and writes through its shell alone")
    note.unlink(missing_ok=True)
    assert _ran(agent, recorder, f"use {kind.name} write").endswith("It is done.")
    assert note.read_text() == NOTE
    assert _ran(agent, recorder, f"use {kind.name} read").endswith("The note says TIN-50.")


@pytest.mark.parametrize("style", STYLES)
def test_what_was_run_once_is_not_run_again(
    stage: Stage, kind: type[Agent], style: Style, caching: Callable[[Server], None]
) -> None:
    caching(stage.server(style))
    agent, recorder = stage.set(kind, style)
    _ran(agent, recorder, f"use {kind.name} shell")
    if style == "hermes":
        _ran(agent, recorder, "say more", follow_up=True)
    turns = recorder.generations()
    assert len(turns) == (3 if style == "hermes" else 2)
    for before, after in itertools.pairwise(turns):
        # The last token of an answer is never run: nothing was to follow it.
        known = before.tokens.prompt + before.tokens.generated - 1
        assert after.tokens.cached >= known, (before.tokens, after.tokens)


def test_a_new_session_shares_the_beginning(
    stage: Stage, kind: type[Agent], caching: Callable[[Server], None]
) -> None:
    caching(stage.server("hermes"))
    agent, recorder = stage.set(kind)
    for prompt in ("say hi", "say it again"):
        _ran(agent, recorder, prompt)
    last = recorder.generations()[-1].tokens
    assert last.cached > 0.75 * last.prompt, last


def test_launch_points_it_here_whatever_its_own_settings_say(
    stage: Stage, kind: type[Agent]
) -> None:
    agent, recorder = stage.set(kind, place="launched")
    agent.work.mkdir(parents=True)
    settings = agent.stray()
    before = settings.read_bytes()
    answer = agent.launched(f"use {kind.name} shell")
    assert recorder.troubles == []
    assert answer.code == 0, answer.log
    assert answer.text.endswith("The command printed COPPER-42.")
    assert (agent.work / "proof.txt").read_text() == "COPPER-42\n"
    assert {e.body["model"] for e in recorder.generations()} == {MODEL}
    assert settings.read_bytes() == before


@pytest.fixture(scope="session")
def caching() -> Callable[[Server], None]:
    def check(server: Server) -> None:
        if server.http.get("/v1/cache").status_code == 404:
            pytest.skip("the server has no prefix cache (no /v1/cache)")

    return check
