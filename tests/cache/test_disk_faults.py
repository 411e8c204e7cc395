"""What goes wrong with disks: killed writers, damaged files, no room, no permission. A payload that
was not put never comes out, and the rest goes on."""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cache.disk_bench import (
    MIB,
    Watch,
    check,
    home,
    payload_files,
    same,
    segment,
    settled,
    state,
    tier,
)

from millrace.cache.disk import DiskUnavailable, Dropped, Stored, Trouble
from millrace.cache.disk import files as disk_files
from millrace.cache.disk.index import NAME, Index

TESTS = Path(__file__).parents[1]
_PUTS = """
import sys
from pathlib import Path
from cache.disk_bench import *
from millrace.cache.disk import Stored, Dropped
disk = tier(Path(sys.argv[1]), int(sys.argv[2]))
first = max([n.id for n in disk.nodes()], default=0) + 1
print("ready", flush=True)
for node in range(first, first + 100_000):
    disk.put(node, node - 1 if node % 5 and node > first else 0, "", [node] * 40,
             segment(node, 40, 64 * (node % 20)), state(node) if node % 3 else None)
    if node % 4 == 0:
        disk.split(node, 15, 1_000_000 + node)
    if node % 50 == 0:
        disk.forget([node - 30])
        print(30 - node, flush=True)
    while disk.backlog > 200_000:
        pass
    for event in disk.poll():
        if isinstance(event, Stored):
            print(event.node, flush=True)
        elif isinstance(event, Dropped):
            print(*(-id for id in event.nodes), flush=True)
"""


@pytest.mark.parametrize("budget", [8 * MIB, 1 << 30])
@pytest.mark.parametrize("seed", range(4))
def test_kill(tmp_path: Path, seed: int, budget: int) -> None:
    """The ids are the node's own, so that every payload can be told from its id."""
    rng = random.Random(seed)
    run = subprocess.Popen(
        [sys.executable, "-c", _PUTS, str(tmp_path), str(budget)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
    )
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    time.sleep(rng.uniform(0.02, 0.8))
    run.send_signal(signal.SIGKILL)
    said = [int(n) for n in run.stdout.read().rpartition(b"\n")[0].split()]
    run.wait()
    disk = tier(tmp_path, budget)
    check(settled(disk), tmp_path)
    nodes = {n.id: n for n in disk.nodes()}
    gone = {-n for n in said if n < 0}
    watch = Watch(disk)
    loaded = watch.read(*((id, True, n.checkpoint is not None) for id, n in nodes.items()))
    assert not loaded.failed and not watch.of(Trouble)
    for id, n in nodes.items():
        own = id if id < 1_000_000 else id - 1_000_000
        found, end = (loaded.payloads or {})[id]
        whole = disk_files.cut(segment(own, 40, 64 * (own % 20)), n.lo, n.hi)
        assert same(found, whole) and n.tokens == [own] * (n.hi - n.lo)
        assert end is None or same(end, state(own))
    # What was said to be stored is there, unless it went: of that the last words may be lost.
    missing = {n for n in said if n > 0} - set(nodes) - gone
    assert len(missing) <= (50 if budget == 8 * MIB else 3), missing
    disk.put(500_000, 0, "", [1], segment(500_000, 1), None)
    assert watch.until(Stored).node == 500_000
    disk.close(5)


def _two(tmp_path: Path) -> dict[int, Path]:
    """A chain of three nodes and one apart; where their segments are."""
    disk = tier(tmp_path)
    for node, parent in ((1, 0), (2, 1), (3, 2), (4, 0)):
        disk.put(node, parent, "", [node] * 10, segment(node, 10), state(node))
    settled(disk)
    where = {n.id: home(tmp_path) / f"{n.file}.safetensors" for n in disk.nodes()}
    disk.close(5)
    return where


def test_a_truncated_or_missing_file_at_start(tmp_path: Path) -> None:
    where = _two(tmp_path)
    os.truncate(where[2], where[2].stat().st_size - 1)
    where[4].unlink()
    (home(tmp_path) / "99.safetensors").write_bytes(b"nobody's")
    (home(tmp_path) / "98.tmp").write_bytes(b"half")
    disk = tier(tmp_path)
    assert [n.id for n in disk.nodes()] == [1]
    check(settled(disk), tmp_path)
    assert same(Watch(disk).one(1), segment(1, 10))
    disk.close(5)


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_bit(tmp_path: Path, seed: int) -> None:
    where = _two(tmp_path)
    data = bytearray(where[2].read_bytes())
    data[random.Random(seed).randrange(len(data))] ^= 1 << (seed % 8)
    where[2].write_bytes(data)
    disk = tier(tmp_path)
    watch = Watch(disk)
    loaded = watch.read((1, True, True), (2, True, False), (3, True, False))
    assert loaded.failed == [2] and loaded.payloads is not None
    assert same(loaded.payloads[1][0], segment(1, 10))
    assert watch.until(Dropped) == Dropped([3, 2])
    assert "damaged" in watch.until(Trouble).message
    assert watch.read((3, True, False)).failed == [3]
    assert {n.id for n in settled(disk).nodes()} == {1, 4}
    check(disk, tmp_path)
    disk.close(5)
    disk = tier(tmp_path)
    assert {n.id for n in disk.nodes()} == {1, 4}
    disk.close(5)


def test_files_that_go_while_it_runs(tmp_path: Path) -> None:
    where = _two(tmp_path)
    disk = tier(tmp_path)
    watch = Watch(disk)
    where[1].unlink()
    os.truncate(where[4], 10)
    assert watch.read((1, True, False), (4, True, False)).payloads is None
    settled(disk)
    assert disk.nodes() == [] and len(watch.of(Trouble)) == 1
    disk.put(5, 0, "", [1], segment(5, 1), None)
    watch.until(Stored)
    check(disk, tmp_path)
    disk.close(5)


def _failing(monkeypatch: pytest.MonkeyPatch, code: int) -> list[bool]:
    """Let writes of payload files fail while the list says so."""
    fails = [True]
    write = os.write

    def failing(fd: int, data: Any) -> int:
        # The account of the folder is short, and SQLite writes by itself.
        if fails[0] and len(data) > 100:
            write(fd, data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        return write(fd, data)

    monkeypatch.setattr(disk_files.os, "write", failing)
    return fails


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1, 1], segment(1, 2), None)
    settled(disk)
    fails = _failing(monkeypatch, errno.ENOSPC)
    disk.put(2, 1, "", [2], segment(2, 1), None)
    disk.put(3, 2, "", [3], segment(3, 1), None)
    disk.put_checkpoint(1, state(1))
    disk.split(1, 1, 4)
    settled(disk)
    assert watch.dropped() == {2, 3}
    assert watch.of(Stored)[-1].checkpoint is False
    assert [t.kind for t in watch.of(Trouble)] == ["full"]
    assert same(watch.one(4), disk_files.cut(segment(1, 2), 0, 1))
    check(disk, tmp_path)
    fails[0] = False
    disk.put(5, 1, "", [5], segment(5, 1), None)
    disk.put_checkpoint(1, state(1))
    watch.until(Stored, lambda e: e.node == 5)
    watch.until(Stored, lambda e: e == Stored(1, True, True))
    check(settled(disk), tmp_path)
    disk.close(5)


def test_a_folder_that_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _two(tmp_path)
    disk = tier(tmp_path)
    watch = Watch(disk)
    _failing(monkeypatch, errno.EROFS)
    disk.put(5, 4, "", [5], segment(5, 1), None)
    assert watch.until(Dropped) == Dropped([5])
    assert watch.until(Trouble).kind == "read-only"
    disk.put(6, 4, "", [6], segment(6, 1), None)
    assert watch.of(Dropped)[-1] == Dropped([6]) and disk.backlog == 0
    assert same(watch.one(4), segment(4, 10))
    disk.close(5)


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", denied)
        with pytest.raises(DiskUnavailable, match="--cache-dir"):
            tier(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(DiskUnavailable, match="Permission denied"):
            tier(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable):
        tier(tmp_path / "file")
    tier(tmp_path).close(5)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskUnavailable):
        tier(tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("how", ["garbage", "middle", "truncated", "empty", "version", "owner"])
def test_a_damaged_index(tmp_path: Path, how: str) -> None:
    _two(tmp_path)
    path = home(tmp_path) / NAME
    data = path.read_bytes()
    if how in ("version", "owner"):
        db = sqlite3.connect(path)
        db.execute(
            "PRAGMA user_version = 99" if how == "version" else "UPDATE about SET fingerprint=1"
        )
        db.commit()
        db.close()
    else:
        middle = data[:4096] + bytes(b ^ 0x5A for b in data[4096:])
        cut = data[: len(data) // 2]
        path.write_bytes(
            {"garbage": b"x" * 9999, "middle": middle, "truncated": cut, "empty": b""}[how]
        )
    disk = tier(tmp_path)
    watch = Watch(disk)
    check(disk, tmp_path)
    assert disk.nodes() == [] and bool(watch.of(Trouble)) == (how != "empty")
    disk.put(1, 0, "", [1], segment(1, 1), None)
    settled(disk).close(5)
    disk = tier(tmp_path)
    assert [n.id for n in disk.nodes()] == [1] and not payload_files(tmp_path)[1:]
    disk.close(5)


@pytest.mark.parametrize(
    "code", [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY]
)
def test_an_index_that_fails_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    names = {
        sqlite3.SQLITE_CORRUPT: "SQLITE_CORRUPT",
        sqlite3.SQLITE_FULL: "SQLITE_FULL",
        sqlite3.SQLITE_READONLY: "SQLITE_READONLY",
    }
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1], segment(1, 1), None)
    watch.until(Stored)
    write = Index.write
    left = [1]

    def failing(self: Index, changes: Any) -> None:
        if left[0]:
            left[0] -= 1
            error = sqlite3.DatabaseError("injected")
            error.sqlite_errorname = names[code]
            raise error
        write(self, changes)

    monkeypatch.setattr(Index, "write", failing)
    disk.put(2, 1, "", [2], segment(2, 1), None)
    watch.until(Trouble)
    if code == sqlite3.SQLITE_READONLY:
        disk.put(3, 2, "", [2], segment(2, 1), None)
        assert watch.until(Dropped).nodes == [3]
        assert same(watch.one(2), segment(2, 1))
    else:
        watch.until(Stored, lambda e: e.node == 2)
    disk.close(5)
    disk = tier(tmp_path)
    there = [1] if code == sqlite3.SQLITE_READONLY else [1, 2]
    assert [n.id for n in disk.nodes()] == there
    check(disk, tmp_path)
    disk.close(5)
