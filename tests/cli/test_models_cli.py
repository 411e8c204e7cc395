"""pull, list, show and rm, as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from huggingface_hub import constants
from models import short_name_shapes as shapes
from typer.testing import CliRunner

from millrace.cli import loaded, models
from millrace.errors import EngineUnavailable, ModelError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from gguf_files import CONTEXT, write_gguf


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    app = typer.Typer()
    models.register(app)
    return app


def run(app: typer.Typer, *words: str, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, list(words), input=answer, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_model_comes_is_shown_and_goes(app: typer.Typer, tmp_path: Path) -> None:
    assert "millrace pull" in run(app, "list")
    assert json.loads(run(app, "list", "--json")) == []
    source = write_gguf(tmp_path / "tiny.gguf").path
    assert "tiny is ready" in run(app, "pull", str(source))
    (listed,) = json.loads(run(app, "list", "--json"))
    assert (listed["architecture"], listed["source"]) == ("llama", "gguf")
    assert listed["name"] in run(app, "list")
    shown = json.loads(run(app, "show", "tiny", "--json"))
    assert (shown["name"], shown["context"]) == ("tiny", CONTEXT)
    assert "chat template" in run(app, "show", "tiny")
    assert "Removed tiny" in run(app, "rm", "tiny", answer="y\n")
    assert json.loads(run(app, "list", "--json")) == []


def test_a_short_name_is_pulled_shown_and_removed(app: typer.Typer, tmp_path: Path) -> None:
    source = "mlx-community/Llama-3.2-1B-Instruct-4bit"
    repo = tmp_path / "hub" / f"models--{source.replace('/', '--')}"
    shapes.text_model("llama", repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert run(app, "pull", "llama3.2:1b").startswith("llama3.2-1b is ready")
    assert json.loads(run(app, "show", "llama3.2:1b", "--json"))["name"] == "llama3.2-1b"
    assert f"Removed {source}" in run(app, "rm", "llama3.2:1b", answer="y\n")
    assert not repo.exists()


@pytest.mark.parametrize(
    ("typed", "suggested"), [("gpt-os-20b", "gpt-oss-20b"), ("qwen3.5-4", "qwen3.5-4b")]
)
def test_a_mistyped_name_is_told_with_near_ones(
    app: typer.Typer, typed: str, suggested: str
) -> None:
    with pytest.raises(ModelError, match=f"no model '{typed}'. Did you mean .*{suggested}"):
        run(app, "pull", typed)


def test_a_folder_comes_before_a_short_name(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes.text_model("llama", tmp_path / "qwen3-4b")
    monkeypatch.chdir(tmp_path)
    assert run(app, "pull", "qwen3-4b").rstrip().endswith("in qwen3-4b")
    shapes.text_model("llama", tmp_path / "home" / "models" / "qwen3-8b")
    assert "home/models/qwen3-8b" in run(app, "pull", "qwen3-8b")


def test_an_architecture_that_cannot_be_served_is_shown_as_such(
    app: typer.Typer, tmp_path: Path
) -> None:
    run(app, "pull", str(write_gguf(tmp_path / "tiny.gguf").path))
    (listed,) = json.loads(run(app, "list", "--json"))
    config = Path(listed["path"]) / "config.json"
    settings = json.loads(config.read_text())
    known = {"llama": True, "mistral": True, "frobnicator": False, "../llama": False}
    for kind, supported in known.items():
        config.write_text(json.dumps(settings | {"model_type": kind}))
        assert json.loads(run(app, "show", "tiny", "--json"))["supported"] is supported
        assert ("not supported" in run(app, "show", "tiny")) is not supported


def test_rm_asks_unless_told_not_to(app: typer.Typer, tmp_path: Path) -> None:
    run(app, "pull", str(write_gguf(tmp_path / "tiny.gguf").path))
    refused = CliRunner().invoke(app, ["rm", "tiny"], input="n\n")
    assert refused.exit_code != 0
    assert len(json.loads(run(app, "list", "--json"))) == 1
    run(app, "rm", "tiny", "--yes")
    assert json.loads(run(app, "list", "--json")) == []


@pytest.mark.parametrize("words", [["show", "nonsense"], ["rm", "nonsense", "--yes"]])
def test_unknown_names_are_errors_in_words(app: typer.Typer, words: list[str]) -> None:
    with pytest.raises(ModelError, match="no model 'nonsense'"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("command", ["pull", "list", "show", "rm"])
def test_help_is_complete(app: typer.Typer, command: str) -> None:
    assert "Usage" in run(app, command, "--help")


def test_where_no_server_answers_it_is_said_how_to_have_one() -> None:
    app = typer.Typer()
    loaded.register(app)
    for words in (["ps"], ["stop", "one"]):
        ended = CliRunner().invoke(app, [*words, "--url", "127.0.0.1:9"])
        assert isinstance(ended.exception, EngineUnavailable)
        assert "Start one with millrace serve" in str(ended.exception)
        assert "Errno" not in str(ended.exception)
