"""Doctor survives what it examines, and says what to do."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from millrace.cli import doctor
from millrace.models.blas import Blas
from millrace.models.device import GIB, Device, DeviceProbe, Kernels


def probe(**changes: object) -> DeviceProbe:
    good = DeviceProbe(
        device=Device(kind="cpu", name="a CPU", memory=8 * GIB, budget=6 * GIB),
        blas=Blas(kind="openblas", path="libopenblas.so"),
        weights="f32",
        dtype="float32",
        gflops=70.0,
        kernels=Kernels("a processor", "AVX2", 2e10),
    )
    return msgspec.structs.replace(good, **changes)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_good_probe_has_no_problems() -> None:
    assert doctor.probe_problems(probe(), "cpu") == []


@pytest.mark.parametrize(
    ("found", "backend", "words"),
    [
        (probe(blas=Blas(kind="reference", problem="It is slow: install X.")), "cpu", "install X"),
        (probe(blas=Blas(kind="reference", detail="off")), "cpu", "Unset MILLRACE_BLAS"),
        (probe(gflops=1.5), "cpu", "1.5 GFLOP/s"),
        (probe(kernels=None), "cpu", "llvmlite is missing"),
        (probe(), "cuda", "nvidia-smi"),
    ],
)
def test_problems_say_what_to_do(found: DeviceProbe, backend: str, words: str) -> None:
    (problem,) = doctor.probe_problems(found, backend)
    assert words in problem


def test_a_crash_of_mlx_is_a_finding() -> None:
    found, fault = doctor.run_probe(python("import os; os.abort()"))
    assert found is None
    assert "SIGABRT" in str(fault)


def test_an_import_error_is_a_finding() -> None:
    found, fault = doctor.run_probe(python("import no_such_module"))
    assert found is None
    assert "no_such_module" in str(fault) and "pip install" in str(fault)


def test_silence_and_hanging_are_findings() -> None:
    assert "no report" in str(doctor.run_probe(python("print('hello')"))[1])
    assert "no report" in str(doctor.run_probe(python(""))[1])
    fault = doctor.run_probe(python("import time; time.sleep(60)"), timeout=0.3)[1]
    assert "did not finish" in str(fault)


def test_other_output_before_the_report_does_no_harm() -> None:
    text = msgspec.json.encode(probe()).decode()
    found, fault = doctor.run_probe(python(f"print('warning: x'); print({text!r})"))
    assert fault is None
    assert found == probe()


def test_port_in_use_by_another_program() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        state, fault = doctor.port_state(port)
        assert state == "in use"
        assert "--port" in str(fault)
    assert doctor.port_state(port) == ("free", None)


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, _ = doctor.disk_free(tmp_path / "not" / "there" / "yet")
    assert free and free > 0
    monkeypatch.setattr(doctor, "_LOW_DISK", 1 << 62)
    assert "MILLRACE_HOME" in str(doctor.disk_free(tmp_path)[1])
    monkeypatch.setattr(doctor, "_LOW_DISK", 0)
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is not a folder" in str(
        doctor.disk_free(tmp_path / "file" / "x")[1]
    )
    monkeypatch.setattr("os.access", lambda *_: False)
    assert f"{tmp_path} cannot be written" in str(doctor.disk_free(tmp_path / "home")[1])


def command(monkeypatch: pytest.MonkeyPatch, home: Path, found: DeviceProbe) -> typer.Typer:
    monkeypatch.setenv("MILLRACE_HOME", str(home))
    monkeypatch.setattr(doctor, "run_probe", lambda: (found, None))
    monkeypatch.setattr(doctor, "port_state", lambda _: ("free", None))
    monkeypatch.setattr(doctor, "_LOW_DISK", 0)
    monkeypatch.setattr("millrace.models.blas.mlx_backend", lambda: "cpu")
    app = typer.Typer()
    doctor.register(app)
    return app


def test_the_command_when_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = CliRunner().invoke(command(monkeypatch, tmp_path, probe()), [])
    assert result.exit_code == 0
    for words in ("openblas", "70.0 GFLOP/s", "float32", "not here yet", "All is well"):
        assert words in result.output


def test_models_that_fit_are_named_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.models.blas.mlx_backend", lambda: "metal")
    told = doctor._fitting(12 * 10**9)
    assert told.startswith("qwen3.5-9b (6.0 GB), ")
    assert told.endswith("millrace serve qwen3.5-9b")
    assert doctor._fitting(0) == "tiny ones"


def test_the_command_as_json_with_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = probe(blas=Blas(kind="reference", problem="It is slow: install X."))
    result = CliRunner().invoke(command(monkeypatch, tmp_path, slow), ["--json"])
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["problems"] == ["It is slow: install X."]
    assert report["probe"]["gflops"] == 70.0
    assert report["default_model"] is None
