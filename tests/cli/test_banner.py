"""What a server shows at its start works where it is shown: also where `millrace` is not on the PATH."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from millrace.cli import serving
from millrace.config import ApiKey, EngineConfig, ServeConfig


def _program(folder: Path) -> Path:
    folder.mkdir(parents=True)
    program = folder / "millrace"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def _shown(capsys: pytest.CaptureFixture[str], **settings: object) -> list[str]:
    config = ServeConfig(engine=EngineConfig(model="", name=""), **settings)  # type: ignore[arg-type]
    serving._welcome(["tiny"], ("127.0.0.1", 9000), config, None, False, [])
    shown = capsys.readouterr().out.partition("Try next:\n")[2]
    return shown.replace("\\\n", "").splitlines()


def test_a_program_that_is_not_on_the_path_is_named_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = _program(tmp_path / "a clone" / ".venv" / "bin")
    monkeypatch.chdir(own.parents[2])
    monkeypatch.setattr(sys, "argv", [".venv/bin/millrace", "serve"])
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    curl, chat, *_ = _shown(capsys)
    assert shlex.split(curl)[:2] == ["curl", "http://127.0.0.1:9000/v1/chat/completions"]
    assert shlex.split(chat) == [str(own), "chat", "--url", "http://127.0.0.1:9000"]
    _program(tmp_path / "elsewhere")  # another installation
    assert shlex.split(_shown(capsys)[1])[0] == str(own)
    monkeypatch.setenv("PATH", str(own.parent))
    with_key = _shown(capsys, api_keys=(ApiKey(secret="sk"),))
    assert with_key[1].strip() == "millrace chat --url http://127.0.0.1:9000 --api-key KEY"


def test_a_module_is_named_with_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py"), "serve"])
    assert shlex.split(_shown(capsys)[1])[:4] == [sys.executable, "-m", "millrace", "chat"]
