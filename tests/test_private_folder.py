"""Temporary folders: private, held by their process, and removed after one that was killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from api import tiny_folder
from conftest import PATIENCE, Server

from millrace.errors import SetupError
from millrace.private_folder import PREFIX, PrivateFolder, sweep

OWNER = """
import sys
from millrace.private_folder import PrivateFolder
folder = PrivateFolder()
(folder.path / "engine-0.sock").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of this test alone."""
    # Addresses of sockets have at most about a hundred characters, and pytest's folders long names.
    folder = Path(tempfile.mkdtemp(prefix="place-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def _killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=PATIENCE)


def test_a_dead_process_s_folder_is_removed_and_a_live_one_s_is_not(place: Path) -> None:
    dead, left = _owner()
    live, kept = _owner()
    assert left.parent == kept.parent == place
    _killed(dead)
    assert sweep() == 1
    assert not left.exists() and (kept / "engine-0.sock").exists()
    _killed(live)
    mine = PrivateFolder()
    assert os.listdir(place) == [mine.path.name], "what is made removes what was left"
    assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
    assert sweep() == 0 and mine.path.is_dir()
    mine.remove()
    mine.remove()
    assert os.listdir(place) == []


def test_what_starts_from_a_process_does_not_hold_its_folder(place: Path) -> None:
    """An engine that outlives its server for a moment."""
    more = OWNER.replace("sys.stdin.read()", "")
    more += "import subprocess; subprocess.Popen(['sleep', '600']); print('begun', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", more + "\nsys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    process.stdout.readline()
    try:
        process.kill()
        process.wait(PATIENCE)
        assert sweep() == 1 and not left.exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_only_folders_of_ours_are_removed(place: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inner").mkdir(parents=True, mode=0o700)
    precious.chmod(0o700)
    (place / f"{PREFIX}link").symlink_to(precious)
    (place / f"{PREFIX}dangling").symlink_to(tmp_path / "nowhere")
    (place / f"{PREFIX}file").write_text("x")
    os.mkfifo(place / f"{PREFIX}pipe")
    (place / "other-run-x").mkdir(mode=0o700)
    (place / "millrace-x").mkdir(mode=0o700)
    open_to_all = place / f"{PREFIX}open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    dead = place / f"{PREFIX}dead"
    dead.mkdir(mode=0o700)
    (dead / "out").symlink_to(precious)
    before = set(os.listdir(place))
    assert sweep() == 1
    assert set(os.listdir(place)) == before - {dead.name}
    assert (precious / "inner").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_user_s_folder_is_left_alone(place: Path) -> None:
    theirs = place / f"{PREFIX}theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    assert sweep() == 0 and theirs.is_dir()


def test_one_that_is_removed_before_it_is_locked_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, swept = os.open, []

    def open_late(path: object, *more: object, **named: object) -> int:
        """Between the folder's making and its lock, another process sweeps and uses the name again."""
        descriptor = opened(path, *more, **named)  # type: ignore[arg-type]
        if isinstance(path, Path) and path.parent == place and not swept:
            swept.append(path)
            assert sweep() == 1
            path.mkdir(mode=0o700)
        return descriptor

    monkeypatch.setattr(os, "open", open_late)
    folder = PrivateFolder()
    assert swept and folder.path not in swept and folder.path.is_dir()
    folder.remove()


def test_one_that_a_cleaner_took_away_is_made_again(place: Path) -> None:
    folder = PrivateFolder()
    first = folder.path
    first.rmdir()
    assert folder.path != first and folder.path.is_dir()
    folder.remove()
    assert os.listdir(place) == []


def test_a_server_that_was_killed_leaves_nothing_behind_the_next(
    place: Path, tmp_path: Path, default_model: Path
) -> None:
    model = str(tiny_folder.make(tmp_path / "tiny", default_model))
    one = Server(model, "--name", "one", "--store", "none").wait_ready()
    left = set(os.listdir(place))
    assert any(name.startswith(PREFIX) for name in left)
    one.process.kill()
    one.process.wait(PATIENCE)
    two = Server(model, "--name", "two", "--store", "none").wait_ready()
    try:
        assert not left & set(os.listdir(place)), "the next start removes it"
        three = Server(model, "--name", "three").wait_ready()
        assert three.stop() == 0
        answer = two.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert answer.status_code == 200, "a server that runs keeps its own"
        two.kill_engine()
        two.restarted()
    finally:
        two.stop()
    assert [n for n in os.listdir(place) if n.startswith(PREFIX)] == []


def test_without_room_for_a_folder_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", full)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(SetupError, match="No temporary folder can be created: .* set TMPDIR"):
        PrivateFolder()
