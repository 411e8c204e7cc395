"""MLX's CPU and CUDA packages bring one library of the same name: which of them is there is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millrace.cli import doctor
from millrace.models import blas

LIBRARY = "mlx/lib/libmlx.so"
BYTES = {"mlx_cpu": 100, "mlx_cuda_13": 900}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mlx" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_folders", lambda package: [tmp_path / package])
    return tmp_path


def install(site: Path, package: str) -> None:
    size = BYTES[package]
    (site / LIBRARY).write_bytes(bytes(size))
    notes = site / f"{package}-0.32.4.dist-info"
    notes.mkdir(exist_ok=True)
    (notes / "RECORD").write_text(f"mlx/include/a,b.h,sha256=x,1\n{LIBRARY},sha256=y,{size}\n")


@pytest.mark.parametrize(
    ("packages", "backend", "overlaid"),
    [
        (["mlx_cpu"], "cpu", None),
        (["mlx_cuda_13"], "cuda", None),
        (["mlx_cpu", "mlx_cuda_13"], "cuda", None),
        (["mlx_cuda_13", "mlx_cpu"], "cpu", "mlx-cuda-13"),
    ],
)
def test_the_package_that_was_installed_last_is_in_use(
    site: Path, packages: list[str], backend: str, overlaid: str | None
) -> None:
    for package in packages:
        install(site, package)
    assert (blas.mlx_backend(), blas.overlaid_cuda()) == (backend, overlaid)


def test_doctor_says_how_to_put_the_library_back(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "mlx_cuda_13")
    install(site, "mlx_cpu")
    monkeypatch.setattr(doctor, "run_probe", lambda: (None, None))
    told = [p for p in doctor.examine().problems if "mlx-cuda-13" in p]
    assert len(told) == 1 and "--force-reinstall --no-deps mlx-cuda-13==" in told[0]
