"""`millrace launch` with programs in the agents' places that tell how they were run.

The agents themselves are run in tests/agents.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from cli.fake_server import Fake, playing
from models import short_name_shapes as shapes

from millrace.cli import agent_models
from millrace.cli.agents import AGENTS, KEY, AgentName, Target
from millrace.cli.remote import Server
from millrace.errors import SetupError
from millrace.models.resolve import Resolved
from millrace.models.suggestions import choices
from millrace.sizes import format_bytes

CLAUDE, CODEX, OPENCODE = (AGENTS[name] for name in AgentName)
TARGET = Target("http://127.0.0.1:8000", "org/it's a coder", 65536, "a $key")
AGENT = """#!{python}
import json, os, sys, urllib.request
told = {{"arguments": sys.argv[1:], "variables": dict(os.environ)}}
if len(sys.argv) > 1 and sys.argv[1] == "ask":
    config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
    told["url"] = config["provider"]["millrace"]["options"]["baseURL"]
    told["models"] = json.load(urllib.request.urlopen(told["url"] + "/models"))
json.dump(told, open("told.json", "w"))
if sys.argv[-1] == "wait":
    sys.stdin.read()
sys.exit(7)
"""


@pytest.fixture
def fake() -> Iterator[Fake]:
    with playing() as server:
        yield server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with programs of the agents' names."""
    for agent in AGENTS.values():
        program = tmp_path / agent.program
        program.write_text(AGENT.format(python=sys.executable))
        program.chmod(0o755)
    return tmp_path


def _start(place: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    path = f"{place}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [sys.executable, "-m", "millrace", "launch", *arguments],
        env=os.environ | {"PATH": path, "PYTHONPATH": os.getcwd()} | env,
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _launch(place: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    process = _start(place, *arguments, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def _told(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "told.json").read_text()))


def _shell(lines: list[str], **env: str) -> dict[str, str]:
    """The variables that a shell has when it has run the lines."""
    script = "\n".join([*lines, "env -0"])
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)


def test_claude_is_led_by_variables_which_its_settings_do_not_outweigh() -> None:
    settings = CLAUDE.launch(TARGET)
    found = settings.environment({"ANTHROPIC_API_KEY": "mine", "PATH": "p"})
    assert "ANTHROPIC_API_KEY" not in found and found["PATH"] == "p"
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert found["ANTHROPIC_AUTH_TOKEN"] == "a $key"
    assert found["ANTHROPIC_MODEL"] == found["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == TARGET.model
    assert found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    option, said = settings.arguments
    assert option == "--settings" and "a $key" not in said
    assert json.loads(said)["env"].items() <= found.items()


def test_codex_is_led_by_arguments_that_are_toml() -> None:
    import tomllib

    settings = CODEX.launch(TARGET)
    assert set(settings.arguments[::2]) == {"-c"}
    config = tomllib.loads("\n".join(settings.arguments[1::2]))
    provider = config["model_providers"]["millrace"]
    assert (config["model"], config["model_context_window"]) == (TARGET.model, 65536)
    assert config["model_provider"] == "millrace"
    assert provider["base_url"] == "http://127.0.0.1:8000/v1"
    assert (provider["wire_api"], provider["env_key"]) == ("responses", KEY)
    assert settings.variables == {KEY: "a $key"}


def test_opencode_is_led_by_a_configuration_in_a_variable() -> None:
    settings = OPENCODE.launch(TARGET)
    config = json.loads(settings.variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == f"millrace/{TARGET.model}"
    provider = config["provider"]["millrace"]
    assert provider["models"][TARGET.model]["limit"] == {"context": 65536, "output": 8192}
    assert "a $key" not in json.dumps(config) and settings.variables[KEY] == "a $key"


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_what_is_printed_does_the_same_in_a_shell(agent: Any) -> None:
    settings = agent.launch(TARGET)
    *lines, last = settings.lines(agent.program, ["-p", "it's"])
    assert shlex.split(last) == [agent.program, *settings.arguments, "-p", "it's"]
    base = {"PATH": os.environ["PATH"], "ANTHROPIC_API_KEY": "mine"}
    found = _shell(lines, **base)
    wanted = settings.environment(base)
    assert {k: v for k, v in found.items() if k in wanted} == wanted
    assert not set(settings.removed) & set(found)
    # A key that the shell has is not shown, and gets there all the same.
    *hidden, _ = settings.lines(agent.program, [], {"a $key": "MILLRACE_API_KEY"})
    assert "a $key" not in "\n".join(hidden)
    assert "a $key" in _shell(hidden, **base, MILLRACE_API_KEY="a $key").values()


def _wide(fake: Fake) -> None:
    fake.models = [
        {"id": "small", "context_window": 8192, "state": "loaded"},
        {"id": "vectors", "context_window": 32768, "state": "loaded"},
        {"id": "cold", "context_window": 65536, "state": "unloaded"},
        {"id": "warm", "context_window": 20480, "state": "loaded"},
        {"id": "other", "context_window": 20480, "state": "loaded", "alias_of": "warm"},
    ]
    able = ["completion", "tools"]
    fake.capabilities = {"vectors": ["embedding"], "cold": able, "warm": able, "small": able}


def test_of_a_servers_models_one_is_chosen_whose_window_fits(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    _wide(fake)
    server = Server(fake.url)
    assert agent_models.of_server(CLAUDE, server, None).name == "warm"
    assert "which is little for Claude Code" in capsys.readouterr().err
    assert agent_models.of_server(CLAUDE, server, "cold").window == 65536
    assert capsys.readouterr().err == ""
    with pytest.raises(SetupError, match="small has a window of 8,192 tokens, too small for Codex"):
        agent_models.of_server(CODEX, server, "small")
    fake.models = fake.models[:2]
    with pytest.raises(SetupError, match=r"about 20,000 tokens\. Windows there: small 8,192, vec"):
        agent_models.of_server(CLAUDE, server, None)


def test_a_server_that_tells_little_is_used_if_its_model_is_named(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent_models.of_server(CODEX, Server(fake.url), "fake").window == agent_models.LITTLE
    assert "32,768 tokens are assumed" in capsys.readouterr().err


def test_without_a_model_for_it_the_advice_is_what_to_fetch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("millrace.models.footprint.device_budget", lambda: 24 * 10**9)
    monkeypatch.setattr("millrace.models.blas.mlx_backend", lambda: "metal")
    for download in (False, True):  # nobody sits at a terminal who could be asked
        with pytest.raises(SetupError, match="--yes or --model glm-4.7-flash fetches it") as told:
            agent_models.of_machine(CLAUDE, None, None, download=download)
        assert "No server runs at http://127.0.0.1:8000" in told.value.message
    monkeypatch.setattr("millrace.models.footprint.device_budget", lambda: 10**9)
    with pytest.raises(SetupError, match="Name one with --model"):
        agent_models.of_machine(CLAUDE, None, None, download=True)


@pytest.mark.parametrize("asked", [None, "y\n", "n\n"])
def test_a_coder_that_fits_is_offered_and_fetched(
    asked: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    best = choices(4 * 10**9, frozenset({"code", "tools"}))[0]
    folder = shapes.text_model(best.architecture, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    wide = {"max_position_embeddings": 65536}
    config |= {"text_config": config["text_config"] | wide} if "text_config" in config else wide
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("millrace.models.footprint.device_budget", lambda: 4 * 10**9)
    monkeypatch.setattr("sys.stdin.isatty", lambda: asked is not None, raising=False)
    questions: list[str] = []

    def confirm(text: str, default: bool) -> bool:
        questions.append(text)
        return asked == "y\n"

    monkeypatch.setattr("typer.confirm", confirm)
    fetched: list[str] = []

    def resolve(name: str, **_: object) -> Resolved:
        fetched.append(name)
        return Resolved(name, folder, "hub")

    monkeypatch.setattr("millrace.models.resolve.resolve", resolve)
    if asked == "n\n":
        with pytest.raises(SetupError, match=f"--model {best.name}"):
            agent_models.of_machine(CODEX, None, None, download=True)
        assert fetched == []
        return
    choice = agent_models.of_machine(CODEX, None, None, download=True, yes=asked is None)
    assert (choice.name, choice.model, choice.window) == (best.name, best.name, 65536)
    assert fetched == [best.name]
    assert questions == (
        []
        if asked is None
        else [f"Fetch {best.name} ({format_bytes(best.bytes)}), which fits this machine?"]
    )


def test_the_agent_runs_with_its_arguments_and_its_status_is_ours(fake: Fake, place: Path) -> None:
    _wide(fake)
    address = fake.url.removeprefix("http://")
    options = ("--url", address, "--api-key", "k", "--", "-p", "say --print")
    status, _, err = _launch(place, "claude", *options, ANTHROPIC_API_KEY="mine")
    assert status == 7, err
    told = _told(place)
    assert told["arguments"][-2:] == ["-p", "say --print"]
    assert told["variables"]["ANTHROPIC_BASE_URL"] == fake.url
    assert told["variables"]["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert told["variables"]["ANTHROPIC_MODEL"] == "warm"
    assert "ANTHROPIC_API_KEY" not in told["variables"]


def test_print_shows_and_runs_nothing(fake: Fake, place: Path) -> None:
    _wide(fake)
    options = ("--print", "--model", "cold", "--", "exec", "hi")
    status, out, err = _launch(
        place, "codex", *options, MILLRACE_URL=fake.url, MILLRACE_API_KEY="k"
    )
    assert (status, err) == (0, "")
    first, last = out.splitlines()
    assert first == f'export {KEY}="$MILLRACE_API_KEY"'
    assert shlex.split(last)[0] == "codex" and shlex.split(last)[-2:] == ["exec", "hi"]
    assert not (place / "told.json").exists()


def test_what_is_wrong_is_said_before_anything_starts(fake: Fake, place: Path) -> None:
    (place / "codex").unlink()
    empty = {"PATH": str(place)}
    status, _, err = _launch(place, "codex", "--url", fake.url, **empty)
    assert status == 1
    assert "npm install -g @openai/codex" in " ".join(err.split())
    status, _, err = _launch(place, "claude", "--url", fake.url, "--model", "no")
    assert status == 1
    assert "has no model 'no'. Models served: fake." in " ".join(err.split())


def test_an_agent_that_is_told_to_end_ends_and_a_server_started_for_it_too(
    place: Path, default_model: Path
) -> None:
    model = tiny_folder.make(place / "tiny", default_model)
    options = ("--model", str(model), "--context", "65536", "--", "ask", "wait")
    process = _start(place, "opencode", *options)
    while process.poll() is None and not _is_written(place / "told.json"):
        pass
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    told = _told(place)
    (served,) = told["models"]["data"]
    assert (served["id"], served["context_window"]) == ("tiny", 65536)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{told['url']}/models")


def _is_written(file: Path) -> bool:
    import time

    time.sleep(0.05)
    try:
        return bool(json.loads(file.read_text()))
    except (OSError, ValueError):
        return False
