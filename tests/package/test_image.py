"""A release image begins with an image that is known by its digest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "0123456789abcdef" * 4
BAD = [
    "", "latest", DIGEST[:-1], f"{DIGEST}0", DIGEST.upper(), DIGEST.replace("sha256:", "sha512:"),
    DIGEST.replace("a", "g"), f"{DIGEST} ; true", "0" * 71, f"x{DIGEST}", DIGEST.replace(":", "-"),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout's packaging, and a docker that notes what it is told and says what `answer` holds."""
    (tmp_path / "packaging").mkdir()
    for name in ("image.py", "Dockerfile"):
        shutil.copy(ROOT / "packaging" / name, tmp_path / "packaging" / name)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/told"\ncat "{tmp_path}/answer" 2>/dev/null\n'
    )
    docker.chmod(0o755)
    return tmp_path


def _run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(place / "packaging" / "image.py"), *arguments],
        env=os.environ | {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _record(place: Path) -> Path:
    return place / "packaging" / "base-image.txt"


def test_the_tag_is_resolved_recorded_and_built_from(place: Path) -> None:
    (place / "answer").write_text(f"{DIGEST}\n")
    done = _run(place, "resolve")
    assert done.returncode == 0, done.stderr
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "packaging/Dockerfile").read_text(), re.M)
    assert base is not None
    assert _record(place).read_text() == f"{base[1]}@{DIGEST}\n"
    asked = (place / "told").read_text().splitlines()
    assert asked[:3] == ["buildx", "imagetools", "inspect"] and asked[-1] == base[1]
    assert _run(place, "build", "cuda13", "--no-cache").returncode == 0
    told = (place / "told").read_text().splitlines()
    assert f"BASE_DIGEST={DIGEST}" in told and "RELEASE=1" in told and "BACKEND=cuda13" in told
    assert told[0] == "build" and told[-2:] == ["--no-cache", str(place)]


def test_without_a_digest_there_is_no_release(place: Path) -> None:
    refused = _run(place, "build")
    assert refused.returncode != 0 and "make base-image" in refused.stderr
    _record(place).write_text(f"python:3.11-slim@{DIGEST}\n")
    refused = _run(place, "build")
    assert refused.returncode != 0 and "python:3.11-slim" in refused.stderr
    for digest in BAD:
        base = (place / "packaging/Dockerfile").read_text().partition("ARG BASE=")[2].split()[0]
        _record(place).write_text(f"{base}@{digest}\n")
        assert _run(place, "build").returncode != 0, digest
    assert not (place / "told").exists(), "docker is not even asked"


@pytest.mark.parametrize("digest", BAD)
def test_what_is_no_digest_is_not_recorded(place: Path, digest: str) -> None:
    (place / "answer").write_text(f"{digest}\n")
    assert _run(place, "resolve").returncode != 0
    assert not _record(place).exists()


def test_other_backends_and_a_missing_docker_are_refused(place: Path) -> None:
    _record(place).write_text(f"x@{DIGEST}\n")
    assert "BACKEND" in _run(place, "build", "tpu").stderr
    (place / "bin" / "docker").write_text("#!/bin/sh\nexit 1\n")
    assert _run(place, "resolve").returncode != 0
    assert _run(place, "nonsense").returncode != 0


@pytest.mark.parametrize(
    ("digest", "release", "fine"),
    [(DIGEST, "1", True), (DIGEST, "", True), ("", "", True), ("", "1", False)]
    + [(bad, release, False) for bad in BAD[1:] for release in ("", "1")],
)
def test_the_build_itself_checks_the_digest(digest: str, release: str, fine: bool) -> None:
    script = str(ROOT / "packaging" / "check-base.sh")
    done = subprocess.run(["sh", script, digest, release], capture_output=True, timeout=60)
    assert (done.returncode == 0) is fine


def test_both_stages_begin_with_the_digest_and_the_check_runs() -> None:
    text = (ROOT / "packaging/Dockerfile").read_text()
    begins = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert len(begins) == 2
    assert all(line.split()[1] == "${BASE}${BASE_DIGEST:+@$BASE_DIGEST}" for line in begins)
    first, second = text.split("FROM ", 2)[1:]
    assert 'check-base.sh "$BASE_DIGEST" "$RELEASE"' in first
    assert "COPY --from=build" in second, "so the second stage needs the first, and its check"


def test_a_recorded_base_is_one() -> None:
    record = ROOT / "packaging" / "base-image.txt"
    if record.exists():
        assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}\n", record.read_text())
