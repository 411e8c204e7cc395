"""`millrace clean` removes what it is told to, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from millrace.cli.app import app
from millrace.errors import SetupError

FILES = {
    "prefixes/0123456789abcdef/1.seg": 4000,
    "responses.sqlite": 300,
    "responses.sqlite-wal": 200,
    "chat_history": 10,
    "compiled/ab/kernels.o": 2000,
    "blas/1/libopenblas.so": 1000,
    "models/smollm2/model.safetensors": 50_000,
    "millrace.toml": 20,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    for name, size in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(bytes(size))
    monkeypatch.setenv("MILLRACE_HOME", str(home))
    return home


def clean(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["clean", *arguments], input=answer)


def left(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {
        ".in-use"
    }


def test_without_words_it_shows_sizes_and_removes_nothing(folder: Path) -> None:
    shown = clean().output
    for words in (("prefixes", "4.0 kB"), ("responses", "510 B"), ("kernels", "3.0 kB")):
        assert any(all(w in line for w in words) for line in shown.splitlines()), shown
    assert "58 kB" in shown and left(folder) == set(FILES)


@pytest.mark.parametrize(
    ("kind", "goes"),
    [
        ("prefixes", ("prefixes/",)),
        ("responses", ("responses.", "chat_history")),
        ("kernels", ("compiled/", "blas/")),
        ("models", ("models/",)),
        ("all", ("prefixes/", "responses.", "chat_history", "compiled/", "blas/", "models/")),
    ],
)
def test_a_kind_goes_and_the_rest_stays(folder: Path, kind: str, goes: tuple[str, ...]) -> None:
    ended = clean(kind, "--yes")
    assert ended.exit_code == 0, ended.output
    assert left(folder) == {name for name in FILES if not name.startswith(goes)}
    assert "nothing of that" in clean(kind, "--yes").output


def test_it_asks_and_takes_no_for_an_answer(folder: Path) -> None:
    ended = clean("prefixes", "kernels", answer="n\n")
    assert ended.exit_code == 1 and "Remove prefixes, kernels (7.0 kB)?" in ended.output
    assert left(folder) == set(FILES)
    assert clean("prefixes", answer="y\n").exit_code == 0
    assert "prefixes" not in " ".join(left(folder))


def test_what_nobody_knows_removes_nothing(folder: Path) -> None:
    for word in ("prefix", "../home/models", "models/smollm2", ""):
        ended = clean("prefixes", word, "--yes")
        assert isinstance(ended.exception, SetupError) and f"no '{word}'" in str(ended.exception)
    assert left(folder) == set(FILES)


def test_a_link_is_removed_and_what_it_points_to_stays(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(bytes(9000))
    (folder / "prefixes" / "link").symlink_to(outside)
    (folder / "compiled").rename(folder / "elsewhere")
    (folder / "compiled").symlink_to(outside)
    assert clean("all", "--yes").exit_code == 0
    assert (outside / "kept").is_file() and not (folder / "compiled").is_symlink()


def test_models_of_the_hub_go_only_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    for name in ("models--a--b", "models--a--c"):
        (hub / name / "blobs").mkdir(parents=True)
        (hub / name / "blobs" / "1").write_bytes(bytes(700))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    assert clean("all", "--yes").exit_code == 0
    assert {p.name for p in hub.iterdir()} == {"models--a--b", "models--a--c"}
    assert "Removed a/b; 700 B" in clean("a/b", "--yes").output
    assert {p.name for p in hub.iterdir()} == {"models--a--c"}


def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    code = "from millrace.occupancy import occupy\noccupy()\nprint('held', flush=True)\ninput()"
    user = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdin is not None and user.stdout is not None
    try:
        assert user.stdout.readline() == "held\n"
        ended = clean("all", "--yes")
        assert isinstance(ended.exception, SetupError) and "uses" in str(ended.exception)
        assert left(folder) == set(FILES)
    finally:
        user.stdin.close()
        user.wait()
    assert clean("all", "--yes").exit_code == 0 and left(folder) == {"millrace.toml"}


def test_a_folder_that_cannot_be_written_to_is_told(folder: Path) -> None:
    # Stands for a disk that is read-only: to root, no folder of a disk that is not is closed.
    (folder / ".in-use").mkdir()
    ended = clean("all", "--yes")
    assert isinstance(ended.exception, SetupError) and "cannot be removed" in str(ended.exception)


def test_where_there_is_no_folder_there_is_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "none"))
    assert "0 B" in clean().output and "nothing of that" in clean("all").output
    assert not (tmp_path / "none").exists()
