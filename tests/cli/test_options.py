"""Every option of `serve` stands in the file and in the environment, too; the shell completes models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.cli.completion import fetchable_names
from millrace.cli.models_served import catalogue_of
from millrace.cli.serve import serve
from millrace.config import EngineConfig, ServeConfig
from millrace.errors import MillraceError, SetupError

SERVE: Any = typer.main.get_command(app).commands["serve"]
OPTIONS = [
    p for p in SERVE.params if p.param_type_name == "option" and p.name not in ("config_", "help")
]
HINTS = {name: str(hint) for name, hint in get_type_hints(serve).items()}


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MILLRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def value_of(option: Any) -> Any:
    if getattr(option, "is_flag", False):
        return not option.default
    hint = HINTS[option.name]
    value = 7 if "int" in hint else 0.5 if "float" in hint else "word"
    return [value] if getattr(option, "multiple", False) else value


def parsed(*arguments: str) -> dict[str, Any]:
    return SERVE.make_context("millrace serve", list(arguments)).params


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_is_read_from_the_environment_and_the_file(
    option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert option.name is not None
    value = value_of(option)
    single = value[0] if isinstance(value, list) else value
    before = parsed()[option.name]
    assert before != value
    with monkeypatch.context() as setting:
        setting.setenv(f"MILLRACE_{option.name.upper()}", str(single))
        assert parsed()[option.name] == value
    spelt = str(single).lower() if isinstance(single, bool) else repr(single)
    (tmp_path / "millrace.toml").write_text(f"{option.name.replace('_', '-')} = {spelt}\n")
    assert parsed()[option.name] == value
    (tmp_path / "millrace.toml").unlink()
    assert parsed()[option.name] == before


def test_the_configuration_file_itself_is_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.toml").write_text("port = 9000")
    monkeypatch.setenv("MILLRACE_CONFIG", str(tmp_path / "other.toml"))
    assert parsed()["port"] == 9000 and parsed("--port", "1")["port"] == 1


@pytest.mark.parametrize("field", ["tool_format", "reasoning_format", "pooling"])
def test_a_wrong_format_is_told_before_a_model_is_looked_for(field: str) -> None:
    config = ServeConfig(engine=EngineConfig(model="", name="", **{field: "nope"}), port=0)

    def progress(*_: object) -> None:
        raise AssertionError("a model is fetched")

    with pytest.raises(MillraceError, match="nope") as told:
        catalogue_of(
            config,
            ["no/such-model"],
            {},
            progress,
            name=None,
            aliases=(),
            pins=(),
            ttl=None,
            only=False,
            folders=(),
        )
    assert "hermes" in str(told.value) or field != "tool_format"


@pytest.mark.parametrize("command", ["serve", "show", "pull", "rm"])
def test_the_shell_completes_names_of_models(command: str, tmp_path: Path) -> None:
    words = {
        "_MILLRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"millrace {command} smol",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'millrace'; from millrace.cli import main; main()",
        ],
        env=os.environ | words | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["smollm2"], done


def test_the_shell_completes_what_can_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert fetchable_names("aut") == ["auto"]
    assert fetchable_names("llama3.2") == [
        "llama3.2-1b",
        "llama3.2-1b-8bit",
        "llama3.2-3b",
        "llama3.2-3b-8bit",
    ]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in ("serve", "pull", "run", "chat"):
        (argument,) = [p for p in commands[command].params if p.param_type_name == "argument"]
        offered = argument.shell_complete(typer.Context(commands[command]), "gpt-oss-2")
        assert [item.value for item in offered] == ["gpt-oss-20b"], command


def test_admin_keys_come_from_the_option_the_environment_and_the_file(tmp_path: Path) -> None:
    """A key that cannot be sent is refused with the name of its option, before anything starts."""
    file = tmp_path / "millrace.toml"
    file.write_text('admin-key = ["sk-1", "kéy"]\n')
    nothing = ["serve", "--config", os.devnull]
    for args, env in (
        ([*nothing, "--admin-key", "kéy"], {}),
        (nothing, {"MILLRACE_ADMIN_KEY": "sk-1 kéy"}),
        (["serve", "--config", str(file)], {}),
    ):
        error = CliRunner().invoke(app, args, env=env).exception
        assert isinstance(error, SetupError) and error.message.startswith("--admin-key: a key"), (
            error
        )


@pytest.mark.parametrize("name", ["embed", "rerank"])
def test_help_says_that_text_generation_is_off_where_a_model_encodes(name: str) -> None:
    (option,) = (p for p in SERVE.params if p.name == name)
    assert "text generation is then off" in (getattr(option, "help", None) or "")


def test_help_shows_how_a_line_of_the_key_file_names_a_role() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    assert "NAME[admin]:KEY" in shown
