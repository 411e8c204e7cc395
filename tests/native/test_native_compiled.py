"""Compiled code on disk: kept, found again, and made anew where it is damaged or cannot be kept."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from kernel_calls import Watched

from millrace.native import compile as compiling
from millrace.native import rowwise


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "compiled" / "version"
    monkeypatch.setattr(compiling, "folder", lambda: place)
    return place


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that something was compiled."""
    seen: list[str] = []
    compiled = compiling._compiled

    def noted(kernels: dict[str, compiling.Body]) -> bytes:
        seen.extend(kernels)
        return compiled(kernels)

    monkeypatch.setattr(compiling, "_compiled", noted)
    return seen


def use() -> None:
    """Have a kernel, and see that it works."""
    code = compiling.compile_kernels("some", {"copy": rowwise.copy})
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3, ctypes.c_float)
    x, out = Watched.of(np.arange(32, dtype=np.float32)[None]), Watched(1, 32)
    signature(code.address["copy"])(x.at, out.at, 2, 3.0)
    assert (out.rows == 3 * x.rows).all()
    out.check()


def test_what_was_compiled_is_found_again(folder: Path, compilations: list[str]) -> None:
    use()
    use()
    assert compilations == ["copy"]
    assert [path.name for path in folder.iterdir()] == ["some.o"]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_code_is_compiled_anew(
    folder: Path, compilations: list[str], data: st.DataObject
) -> None:
    use()
    path = folder / "some.o"
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from(
            [
                good[:at],
                good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :],
                good[:at] + bytes(len(good) - at),
                good + b"more",
                good[at + 1 :],
                b"\x7fELF" + b"\xff" * at,
                good[32:],
            ]
        )
    )
    path.write_bytes(bad)
    compilations.clear()
    use()
    assert compilations == ([] if bad == good else ["copy"])
    assert path.read_bytes() == good, "and what is kept is whole again"
    use()
    assert len(compilations) <= 1


@pytest.mark.parametrize("what", ["a folder", "a link to nowhere"])
def test_what_is_no_file_of_ours_does_no_harm(
    folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    if what == "a folder":
        (folder / "some.o" / "inner").mkdir(parents=True)
    else:
        (folder / "some.o").symlink_to(folder / "nowhere")
    with caplog.at_level(logging.WARNING):
        use()
        use()
    assert len(list(folder.iterdir())) == 1, "nothing unfinished is left behind"
    assert ("cannot be kept" in caplog.text) == (what == "a folder")


def test_a_place_where_nothing_can_be_kept_costs_only_the_compilation(
    folder: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        use()
        use()
    assert compilations == ["copy", "copy"]
    assert "cannot be kept" in caplog.text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_costs_only_the_compilation(
    folder: Path, compilations: list[str]
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    try:
        use()
        use()
    finally:
        folder.chmod(0o700)
    assert compilations == ["copy", "copy"]


def test_a_full_disk_costs_only_the_compilation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        use()
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []


def test_sources_and_processor_name_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiling.folder()
    compiling.folder.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(compiling, "processor", lambda: ("another", "+none"))
            other = compiling.folder()
        assert other != here and other.parent == here.parent
    finally:
        compiling.folder.cache_clear()
    assert compiling.folder() == here


_AT_ONCE = """
import sys
from millrace.native import library
from millrace.native.formats import Format
print("ready", flush=True)
sys.stdin.readline()
library.of_format(Format("u4", 32, "f16", True))
from kernel_calls import multiply, random_matrix
import numpy as np
rng = np.random.default_rng(0)
matrix = random_matrix(Format("u4", 32, "f16", True), 64, 2, rng)
print(multiply(matrix, rng.normal(size=(13, 64)).astype(np.float32)).tobytes().hex())
"""


def test_processes_that_compile_at_once_all_get_their_code(tmp_path: Path) -> None:
    env = os.environ | {
        "MILLRACE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    several = [
        subprocess.Popen(
            [sys.executable, "-c", _AT_ONCE],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in several:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    found = set()
    for process in several:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in several:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        found.add(output)
    assert len(found) == 1 and len(found.pop()) > 1000
    kept = [path.name for path in (tmp_path / "compiled").rglob("*") if path.is_file()]
    assert kept == ["u4_32_f16_biased.o"]
