"""A damaged index: the start succeeds, nothing wrong is ever read, and what was damaged is kept."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from cache.disk_bench import Watch, check, home, same, segment, settled, state, tier

from millrace.cache.disk import DiskUnavailable, Dropped, Stored, Trouble
from millrace.cache.disk.index import ASIDE, NAME, Index

NODES = 40
TOKENS = 30


def _tokens(node: int) -> list[int]:
    return [3 * node + i for i in range(TOKENS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose index has a log beside it, as after a kill."""
    base = tmp_path_factory.mktemp("whole")
    disk = tier(base / "open")
    for node in range(1, NODES + 1):
        parent, salt = (node - 1 if node % 7 else 0), "s" if node % 14 > 7 else ""
        end = state(node) if node % 3 == 0 else None
        disk.put(node, parent, salt, _tokens(node), segment(node, TOKENS), end)
        if node == NODES // 2:
            settled(disk)
    settled(disk)
    shutil.copytree(base / "open", base / "left")
    disk.close(5)
    assert (home(base / "left") / f"{NAME}-wal").stat().st_size
    return base / "left"


def _check_start(folder: Path) -> bool:
    """Start, and look at every byte of what is there; whether anything is."""
    disk = tier(folder)
    watch = Watch(disk)
    nodes = disk.nodes()
    for node in nodes:
        assert node.tokens == _tokens(node.id)
        assert same(watch.one(node.id), segment(node.id, TOKENS))
    disk.put(1000, 0, "", [10_000], segment(1000, 1), None)
    assert watch.until(Stored, lambda e: e.node == 1000)
    check(settled(disk), folder)
    assert len(watch.of(Trouble)) <= 1
    assert bool(watch.of(Trouble)) == (home(folder) / ASIDE).exists()
    disk.close(5)
    disk = tier(folder)
    assert 1000 in {n.id for n in disk.nodes()}
    disk.close(5)
    return bool(nodes)


def _overwrite(path: Path, rng: random.Random, count: int, least: int, most: int | None) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(count):
        at = rng.randrange(least, min(most or len(data), len(data)) - 4)
        data[at : at + 4] = rng.randbytes(4)
    path.write_bytes(data)


def test_what_is_whole_is_found(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    assert _check_start(folder)


@pytest.mark.parametrize("count", [1, 6, 60])
@pytest.mark.parametrize("where", ["header", "pages", "log"])
def test_random_writes_into_the_index(whole: Path, tmp_path: Path, where: str, count: int) -> None:
    for seed in range(8):
        folder = Path(shutil.copytree(whole, tmp_path / f"{seed}"))
        rng = random.Random(f"{where} {count} {seed}")
        path = home(folder) / NAME
        if where == "log":
            _overwrite(path.with_name(f"{NAME}-wal"), rng, count, 0, None)
        else:
            # The log's pages would win over the file's.
            db = sqlite3.connect(path)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.close()
            _overwrite(path, rng, count, *((0, 4096) if where == "header" else (4096, None)))
        _check_start(folder)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_an_index_that_was_cut_off(whole: Path, tmp_path: Path, part: float) -> None:
    for name in (NAME, f"{NAME}-wal"):
        folder = Path(shutil.copytree(whole, tmp_path / name))
        path = home(folder) / name
        os.truncate(path, int(part * path.stat().st_size))
        _check_start(folder)


def test_a_folder_in_the_place_of_the_index(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    path = home(folder) / NAME
    for name in (NAME, f"{NAME}-wal"):
        path.with_name(name).unlink()
    path.mkdir()
    (path / "file").write_text("somebody's")
    disk = tier(folder)
    watch = Watch(disk)
    assert disk.nodes() == [] and len(watch.of(Trouble)) == 1
    disk.put(1, 0, "", [1], segment(1, 1), None)
    watch.until(Stored)
    disk.close(5)
    assert [p.read_text() for p in home(folder).glob("*/file")] == ["somebody's"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads anything")
@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_an_index_without_permission(whole: Path, tmp_path: Path, mode: int) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (home(folder) / NAME).chmod(mode)
    with pytest.raises(DiskUnavailable, match="--cache-dir"):
        tier(folder)
    (home(folder) / NAME).chmod(0o600)
    assert _check_start(folder)


@pytest.mark.parametrize("name", ["SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM"])
def test_an_index_that_may_not_be_opened_stays_as_it_is(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))

    def denied(self: Index) -> sqlite3.Connection:
        error = sqlite3.OperationalError("not for you")
        error.sqlite_errorname = name
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_open", denied)
        with pytest.raises(DiskUnavailable, match="not for you.*--cache-dir"):
            tier(folder)
    assert _check_start(folder)


def test_two_damaged_indexes_leave_the_last_one(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (home(folder) / f"{NAME}-wal").unlink()
    for text in (b"first" * 2000, b"second" * 2000):
        (home(folder) / NAME).write_bytes(text)
        tier(folder).close(5)
        assert (home(folder) / ASIDE).read_bytes() == text


def test_a_large_damaged_index_is_not_kept(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (home(folder) / f"{NAME}-wal").unlink()
    (home(folder) / NAME).write_bytes(b"x" * (3 << 20))
    disk = tier(folder)
    check(settled(disk), folder)
    assert not (home(folder) / ASIDE).exists()
    disk.close(5)


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("disk I/O error"),
        sqlite3.ProgrammingError("misuse"),
        sqlite3.InterfaceError("odd"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd text"),
        RuntimeError("anything"),
    ],
)
def test_errors_while_it_runs_turn_the_tier_off_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1], segment(1, 1), None)
    watch.until(Stored)

    def failing(self: Index, changes: Any) -> None:
        raise error

    monkeypatch.setattr(Index, "write", failing)
    node = 1
    while not any(t.off for t in watch.of(Trouble)):
        node += 1
        disk.put(node, 1, "", [node], segment(node, 1), None)
        settled(disk)
        assert node < 50
    assert str(error) in next(t.message for t in watch.of(Trouble) if t.off)
    disk.put(99, 0, "", [99], segment(99, 1), None)
    watch.until(Dropped, lambda e: e.nodes == [99])
    assert same(watch.one(1), segment(1, 1))
    disk.close(5)
