"""The proof of a tiny model on a real server, and what its report says and does not say."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from api import tiny_folder
from typer.testing import CliRunner

from millrace.cli import doctor
from millrace.cli.app import app
from millrace.errors import MillraceError, SetupError
from millrace.models.blas import Blas
from millrace.models.device import Device, DeviceProbe
from millrace.prove import questions, run, speed
from millrace.prove.report import (
    ModelProof,
    ProofReport,
    ReportLine,
    Verdict,
    as_json,
    as_markdown,
    cleaned,
    own_names,
)

SMALLEST = questions.QuestionSettings(
    prompts=2,
    longest=40,
    tokens=24,
    speed_prompt=16,
    speed_tokens=4,
    speed_seconds=0.0,
    rounds=1,
    load=8,
)
CHECKS = ("alone again", "batched", "cached", "next turn", "streamed", "resumed", "from disk")
HEAVY = "MILLRACE_HEAVY" in os.environ
"""Whether all of it runs: mlx-lm, the device and a second server take longer than the rest."""
PROBE = DeviceProbe(
    device=Device(kind="cpu", name="a CPU", memory=8 << 30, budget=6 << 30),
    blas=Blas(kind="openblas", path="/somewhere/libopenblas.so"),
    weights="f32",
    dtype="float32",
    gflops=70.0,
)


def without_mlx_lm(folder: Path, weights: str, *, room: Path) -> NoReturn:
    raise SetupError(f"mlx-lm cannot load {folder}.")


def one_server(serve: Callable[..., Any]) -> Callable[..., Any]:
    """What starts servers, the first time; then it fails."""
    started: list[int] = []

    def start(*words: Any, **more: Any) -> Any:
        if started:
            raise SetupError("The server does not start.")
        started.append(1)
        return serve(*words, **more)

    return start


@pytest.fixture(scope="module")
def proven(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> tuple[int, str, dict[str, Verdict], str, str]:
    """Exit status, output, verdicts by check, and both files."""
    folder = tmp_path_factory.mktemp("proof")
    model = tiny_folder.make(folder / "secret-name", default_model)
    report = folder / "proof.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "QUICK", SMALLEST)
        if not HEAVY:
            patch.setattr(speed, "beside", without_mlx_lm)
            patch.setattr(run, "serve", one_server(run.serve))
            patch.setattr(doctor, "run_probe", lambda: (PROBE, None))
        patch.chdir(folder)  # names that are told from here hold for the servers, too
        done = CliRunner().invoke(app, ["prove", f"./{model.name}", "--quick", "--out", "proof.md"])
    found = json.loads(report.with_suffix(".json").read_text())
    verdicts = {line["check"]: line["verdict"] for line in found["models"][0]["lines"]}
    both = report.read_text(), report.with_suffix(".json").read_text()
    return done.exit_code, done.output, verdicts, *both


def test_every_way_is_equal_to_alone(
    proven: tuple[int, str, dict[str, Verdict], str, str],
) -> None:
    status, output, verdicts, *_ = proven
    for check in CHECKS:
        for kind in ("temperature 0", "by seed"):
            assert verdicts[f"{check}, {kind}"] == "pass", output
    assert verdicts["streamed, as text"] == "pass", output
    for check in ("start", "restart", "prefill, 8 rows", "decode, 1 row"):
        assert verdicts[check] == "told"
    if HEAVY:
        for check in ("alone as mlx-lm, temperature 0", "guessed, temperature 0", "memory"):
            assert verdicts[check] == "pass", output
    assert status == (0 if HEAVY else 1), output


@pytest.mark.skipif(HEAVY, reason="all of it can run")
def test_what_cannot_run_is_no_pass_and_says_why(
    proven: tuple[int, str, dict[str, Verdict], str, str],
) -> None:
    status, output, verdicts, markdown, _ = proven
    for check in ("beside mlx-lm", "second start", "guessed", "memory"):
        assert verdicts[check] == "not run"
    assert status == 1
    assert "| – not run | beside mlx-lm | mlx-lm cannot load [path]. |" in markdown
    assert "secret-name" in output  # the terminal has it whole


def test_the_files_name_no_path_host_user_or_prompt(
    proven: tuple[int, str, dict[str, Verdict], str, str], tmp_path: Path
) -> None:
    *_, markdown, figures = proven
    for text in (markdown, figures):
        assert "a model of their own" in text and "secret-name" not in text
        for name in (*own_names(), "127.0.0.1", "localhost"):
            assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.I)
        for folder in (Path.home(), tmp_path.parents[1], Path(sys.prefix)):
            assert str(folder) not in text
        assert "notes" not in text  # which stands in every prompt


def proof(*verdicts: Verdict) -> ProofReport:
    lines = [ReportLine(check="a", verdict=v, detail="b | c") for v in verdicts]
    model = ModelProof(name="m", shape="s", lines=lines)
    return ProofReport(date="2026-01-01", quick=True, machine={"system": "x"}, models=[model])


def test_the_exit_status_is_zero_only_if_all_held() -> None:
    assert proof("pass", "told").status == 0
    assert proof("pass", "near-tie").status == 3
    for worse in ("fail", "not run"):
        assert proof("pass", "near-tie", worse).status == 1
    assert proof("told").status == 1  # nothing was proven
    assert ProofReport(date="", quick=True, machine={}).status == 1


def test_a_report_shows_what_failed() -> None:
    found = proof("pass", "fail")
    assert "1 passed, 1 failed" in as_markdown(found)
    assert "| ✗ fail | a | b \\| c |" in as_markdown(found)
    assert json.loads(as_json(found))["status"] == 1


@pytest.mark.parametrize(
    ("sentence", "clean"),
    [
        ("no file /home/ann/models/x.gguf, sorry", "no file [path], sorry"),
        ("in '~/models/x' and ./y/z", "in '[path]' and [path]"),
        ("C:\\Users\\ann\\m is gone", "[path] is gone"),
        ("asked http://box.local:80/v1 twice", "asked [address] twice"),
        ("Ann on box: 3/4 of 12 tokens/s", "[name] on [name]: 3/4 of 12 tokens/s"),
        ("annual boxes", "annual boxes"),
        ("two\nlines", "two lines"),
    ],
)
def test_sentences_from_elsewhere_are_cleaned(sentence: str, clean: str) -> None:
    assert cleaned(sentence, ("ann", "box", "a")) == clean


def test_what_cannot_work_is_said_before_anything_is_run(tmp_path: Path) -> None:
    out = tmp_path / "proof.md"
    for words in (
        ["--out", str(tmp_path / "nowhere" / "proof.md")],
        ["--out", str(tmp_path)],
        ["--out", str(tmp_path / "proof.json")],
        ["--out", str(out), str(tmp_path / "no-model")],
        ["--out", str(out), "--weights", "f64"],
    ):
        done = CliRunner().invoke(app, ["prove", *words])
        assert isinstance(done.exception, MillraceError), done.output
    assert not list(tmp_path.iterdir())


def test_where_mlx_does_not_work_there_is_a_report_that_says_why(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = f"MLX crashed (SIGILL) in {tmp_path}/lib."
    monkeypatch.setattr(doctor, "run_probe", lambda: (None, fault))
    report = tmp_path / "proof.md"
    done = CliRunner().invoke(app, ["prove", "--out", str(report)])
    assert done.exit_code == 1 and "SIGILL" in done.output, done.output
    text = report.read_text()
    assert "MLX crashed (SIGILL) in [path]" in text and "| Python | " in text
    assert json.loads(report.with_suffix(".json").read_text())["status"] == 1
