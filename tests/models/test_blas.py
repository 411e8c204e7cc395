"""The BLAS is put in place before MLX, once, and every failure is a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from millrace.models import blas

linux_cpu = pytest.mark.skipif(
    not sys.platform.startswith("linux") or blas.mlx_backend() != "cpu",
    reason="a BLAS is loaded for MLX's CPU back-end on Linux only",
)

PREPARE = """
import msgspec
from millrace.models import blas
print(msgspec.json.encode(blas.prepare()).decode())
"""

MULTIPLY = """
import sys, time
from millrace.models import blas
blas.prepare()
import mlx.core as mx
import numpy as np
a, b = mx.random.normal((512, 512)), mx.random.normal((512, 512))
mx.eval(a, b, a @ b)
assert np.allclose(np.array(a @ b), np.array(a) @ np.array(b), atol=1e-2)
x = mx.random.normal((64, 64))
u, s, v = mx.linalg.svd(x, stream=mx.cpu)
assert np.allclose(np.array((u * s) @ v), np.array(x), atol=1e-3)
start = time.process_time()
for _ in range(8):
    mx.eval(a @ b)
print(8 * 2 * 512**3 / (time.process_time() - start) / 1e9)
"""


def start(code: str, home: Path, **env: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "MILLRACE_"))}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=kept | {"MILLRACE_HOME": str(home)} | env,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(code: str, home: Path, **env: str) -> str:
    process = start(code, home, **env)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out


def prepared(home: Path, code: str = PREPARE, **env: str) -> blas.Blas:
    return msgspec.json.decode(run(code, home, **env), type=blas.Blas)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process as if nothing had been prepared or imported yet."""
    monkeypatch.setattr(blas, "_prepared", None)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("MILLRACE_BLAS", raising=False)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "12")
    return tmp_path


@linux_cpu
def test_openblas_multiplies_for_mlx(tmp_path: Path) -> None:
    per_core_second = float(run(MULTIPLY, tmp_path))
    assert per_core_second > 6, "the reference BLAS reaches 2.5"


@linux_cpu
def test_two_processes_make_one_library(tmp_path: Path) -> None:
    racing = [start(PREPARE, tmp_path) for _ in range(3)]
    found = [msgspec.json.decode(p.communicate(timeout=120)[0], type=blas.Blas) for p in racing]
    assert {b.kind for b in found} == {"openblas"}
    assert len({b.path for b in found}) == 1
    generated = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert generated == [Path(str(found[0].path))]


@linux_cpu
def test_threads_are_left_to_the_user(tmp_path: Path) -> None:
    code = PREPARE + "\nimport os\nprint(os.environ['OPENBLAS_NUM_THREADS'])"
    assert run(code, tmp_path, OPENBLAS_NUM_THREADS="7").split()[-1] == "7"
    assert run(code, tmp_path).split()[-1] == str(blas.usable_cores())


@linux_cpu
def test_override(tmp_path: Path) -> None:
    off = prepared(tmp_path, MILLRACE_BLAS="off")
    assert (off.kind, off.problem, off.fast) == ("reference", None, False)
    bad = prepared(tmp_path, MILLRACE_BLAS=str(tmp_path / "none.so"))
    assert bad.kind == "reference" and "MILLRACE_BLAS" in str(bad.problem)
    library = str(prepared(tmp_path).path)
    named = prepared(tmp_path, MILLRACE_BLAS=library)
    assert (named.kind, named.path) == ("system-openblas", library)


@linux_cpu
def test_mlx_imported_too_early(tmp_path: Path) -> None:
    late = prepared(tmp_path, "import mlx.core\n" + PREPARE)
    assert late.kind == "reference"
    assert "before" in str(late.problem)


@linux_cpu
def test_nothing_installed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = blas._folders
    monkeypatch.setattr(blas, "_folders", lambda p: [] if "openblas" in p else real(p))
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    found = blas.prepare()
    assert found.kind == "reference"
    assert blas.INSTALL in str(found.problem)


@linux_cpu
def test_failed_rename_leaves_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_patchelf", lambda: "/bin/false")
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    found = blas.prepare()
    assert "patchelf failed" in str(found.problem)
    assert [p for p in fresh.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


@linux_cpu
def test_unwritable_home(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "blas").write_text("a file where a folder should be")
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    assert "cannot be made ready" in str(blas.prepare().problem)


def test_never_raises_and_is_asked_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def choose() -> blas.Blas:
        asked.append(1)
        raise RuntimeError("no luck")

    monkeypatch.setattr(blas, "_choose", choose)
    found: list[blas.Blas] = []
    threads = [threading.Thread(target=lambda: found.append(blas.prepare())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert len(found) == 8 and all(b is found[0] for b in found)
    assert "no luck" in str(found[0].problem)
    assert len(caplog.records) == 1


def test_mac_needs_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.prepare().kind == "accelerate"


def test_cuda_needs_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "mlx_backend", lambda: "cuda")
    assert blas.prepare().kind == "none-needed"


@pytest.mark.parametrize(
    ("distribution", "platform", "backend"),
    [
        ("mlx_cpu-0.32.4.dist-info", "linux", "cpu"),
        ("mlx_cuda_13-0.32.4.dist-info", "linux", "cuda"),
        ("mlx_metal-0.32.4.dist-info", "darwin", "metal"),
    ],
)
def test_backend_is_told_without_mlx(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    platform: str,
    backend: str,
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / distribution).mkdir()
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(blas, "_folders", lambda _: [tmp_path / "mlx"])
    assert blas.mlx_backend() == backend


def test_cores_respect_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for lines, cores in [
        ([], 8),
        (["max 100000"], 8),
        (["150000 100000"], 2),
        (["max 100000", "400000 100000"], 4),
        (["10000 100000"], 1),
    ]:
        monkeypatch.setattr(blas, "cgroup_values", lambda _, lines=lines: lines)
        assert blas.usable_cores() == cores
