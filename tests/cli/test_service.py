"""`millrace service`: the files it writes, for systemd and launchd, and what it runs."""

from __future__ import annotations

import configparser
import plistlib
import shlex
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millrace.cli.app import app
from millrace.cli.service import service_of
from millrace.cli.service_files import Launchd, Service, Systemd
from millrace.errors import SetupError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user of the test's own, and a systemctl that writes down what it is asked."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("systemctl", "launchctl"):
        program = programs / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\n'
            f'case "$*" in *is-active*) test -e {tmp_path}/active;; *print*) exit 1;; esac\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for name in ("MILLRACE_HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def service(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["service", *arguments])


def asked(home: Path) -> list[str]:
    file = home / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_print_shows_the_file_and_does_nothing(home: Path) -> None:
    shown = service("install", "--print", "--", "smollm2", "--port", "9000")
    assert shown.exit_code == 0, shown.output
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(shown.output)
    assert shlex.split(unit["Service"]["ExecStart"]) == [
        *(sys.executable, "-P", "-m", "millrace", "serve", "smollm2", "--port", "9000")
    ]
    assert unit["Install"]["WantedBy"] == "default.target"
    assert unit["Service"]["Restart"] == "on-failure"
    assert not asked(home) and not (home / "user").exists()


def test_install_status_and_remove_on_systemd(home: Path) -> None:
    assert service("status").exit_code == 1
    ended = service("install", "--", "--port", "9000", "--api-key", "secret")
    assert ended.exit_code == 0, ended.output
    file = home / "user/.config/systemd/user/millrace.service"
    assert "--port 9000" in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [line.split()[2] for line in asked(home)] == ["daemon-reload", "enable", "restart"]
    assert service("status").exit_code == 3
    (home / "active").touch()
    running = service("status")
    assert running.exit_code == 0 and "running" in running.output
    assert service("install").exit_code == 0 and "--port 9000" not in file.read_text()
    assert service("remove").exit_code == 0 and not file.exists()
    assert asked(home)[-2:] == [
        "systemctl --user disable --now millrace.service",
        "systemctl --user daemon-reload",
    ]
    assert isinstance(service("remove").exception, SetupError)


def test_install_and_remove_on_launchd(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("MILLRACE_HOME", "models here")
    assert service("install", "--", "--port", "9000").exit_code == 0
    file = home / "user/Library/LaunchAgents/org.millrace.server.plist"
    agent = plistlib.loads(file.read_bytes())
    assert agent["ProgramArguments"][-2:] == ["--port", "9000"] and agent["RunAtLoad"]
    assert agent["EnvironmentVariables"] == {"MILLRACE_HOME": str(home / "here/models here")}
    assert asked(home)[0].startswith("launchctl bootout gui/")
    assert asked(home)[-1].startswith("launchctl bootstrap gui/")
    assert service("remove").exit_code == 0 and not file.exists()


def test_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "sunos5")
    assert "systemd on Linux" in str(service("install").exception)


def test_what_starts_nothing_says_what_failed(home: Path) -> None:
    (home / "programs" / "systemctl").write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    ended = service("install")
    assert isinstance(ended.exception, SetupError) and "no bus" in str(ended.exception)
    assert "service remove" in str(ended.exception)
    assert service("remove").exit_code == 0


def test_wrong_arguments_are_refused_at_once(home: Path) -> None:
    assert service("install", "--", "--prot", "9000").exit_code == 2
    assert service("install", "--", "--port", "many").exit_code == 2
    with pytest.raises(SetupError, match="plain text"):
        service_of(["a\nb"])
    assert not (home / "user").exists()


def test_paths_and_the_configuration_hold_from_any_folder(home: Path) -> None:
    here = home / "here"
    (here / "model").mkdir()
    (here / "millrace.toml").write_text("port = 9000")
    words = list(service_of(["./model", "mine=./model", "smollm2", "org/name"]).command)[5:]
    model = str(here / "model")
    assert words == [
        model,
        f"mine={model}",
        "smollm2",
        "org/name",
        "--config",
        str(here / "millrace.toml"),
    ]
    words = list(service_of(["--config=./millrace.toml"]).command)[5:]
    assert words == [f"--config={here / 'millrace.toml'}"]


def test_options_in_the_environment_are_said_not_to_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_PORT", "9000")
    assert "MILLRACE_PORT" in service("install").output


def test_words_are_written_as_systemd_reads_them() -> None:
    hard = ["/opt/my python", 'a "b"', "100%", "$HOME", "back\\slash", "", "it's", "ü"]
    text = Systemd().text(Service(hard, {"HF_HOME": "/a b/$c/%d"}))
    assert (
        'ExecStart="/opt/my python" "a \\"b\\"" 100%% "$$HOME" "back\\\\slash" "" "it\'s" "ü"'
        in text
    )
    assert 'Environment="HF_HOME=/a b/$c/%%d"' in text
    assert plistlib.loads(Launchd().text(Service(hard, {})).encode())["ProgramArguments"] == hard
