"""The disk tier as the engine uses it: what is put comes back, whole or cut, now or after a restart."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cache.disk_bench import MARK, Watch, check, home, part, same, segment, settled, state, tier
from conftest import PATIENCE, until
from safetensors.numpy import load_file

from millrace.cache.disk import DiskTier, DiskUnavailable, Dropped, PayloadsRead, Stored, StoredNode
from millrace.cache.disk import files as disk_files
from millrace.cache.payload import Payload


def test_round_trip(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "salt", [5, 6, 7], segment(1, 3), state(1))
    disk.put(2, 1, "salt", [8], None, state(2))
    disk.put(3, 1, "salt", [9, 1 << 40], segment(3, 2), None)
    assert watch.until(Stored, lambda e: e.node == 1) == Stored(1, True, True)
    assert watch.until(Stored, lambda e: e.node == 2) == Stored(2, False, True)
    assert watch.until(Stored, lambda e: e.node == 3) == Stored(3, True, False)
    loaded = watch.read((1, True, True), (2, False, True), (3, True, False))
    assert loaded.payloads is not None and not loaded.failed
    for node, (s, c) in {
        1: (segment(1, 3), state(1)),
        2: (None, state(2)),
        3: (segment(3, 2), None),
    }.items():
        assert same(loaded.payloads[node][0], s) and same(loaded.payloads[node][1], c)
    assert disk.entries == 3 and disk.backlog == 0
    check(disk, tmp_path)
    disk.close(5)


def test_files_are_safetensors(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.put(1, 0, "", [1, 2], segment(1, 2), None)
    settled(disk).close(5)
    (path,) = home(tmp_path).glob("*.safetensors")
    found = load_file(path)
    assert same(
        Payload({n: found[n] for n in segment(1, 2).arrays}, "x"), _with("x", segment(1, 2))
    )
    assert os.stat(path).st_mode & 0o077 == 0


def _with(meta: str, payload: Payload) -> Payload:
    return Payload(payload.arrays, meta)


@pytest.mark.parametrize("dtype", sorted(str(d) for d in disk_files._DTYPES.values()))
def test_every_type_of_array(tmp_path: Path, dtype: str) -> None:
    arrays = {
        "a": np.arange(24).reshape(1, 2, 3, 4).astype(dtype)[:, :, ::-1],
        "wide": np.ones((1, 1, 3), np.float64),
        "empty": np.zeros((0, 1, 3), dtype),
    }
    payload = Payload(arrays, "é\n")
    path = tmp_path / "1.safetensors"
    head = disk_files.head(payload)
    crc = disk_files.write(path, head, payload, sync=False)
    size = len(head) + payload.nbytes
    assert path.stat().st_size == size
    assert same(disk_files.read(path, size, crc), payload)


def test_what_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    with pytest.raises(ValueError, match="complex"):
        disk.put(1, 0, "", [1], Payload({"z": np.zeros((1, 1, 1), complex)}), None)
    with pytest.raises(ValueError, match="axis 2"):
        disk.put(1, 0, "", [1, 2], segment(1, 3), None)
    with pytest.raises(ValueError, match="token"):
        disk.put(1, 0, "", [], None, None)
    disk.put(1, 0, "", [1, 2], segment(1, 2), None)
    with pytest.raises(ValueError, match="split"):
        disk.split(1, 2, 9)
    disk.close(5)


def test_split_then_read_both_halves(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1, 2, 3, 4, 5], segment(1, 5), state(1))
    disk.put(2, 1, "", [6], segment(2, 1), None)
    settled(disk).split(1, 2, 3)
    disk.split(1, 1, 4)
    for _ in range(2):
        loaded = watch.read((3, True, False), (4, True, False), (1, True, True))
        assert loaded.payloads is not None
        whole = segment(1, 5)
        assert same(loaded.payloads[3][0], part(whole, 0, 2))
        assert same(loaded.payloads[4][0], part(whole, 2, 3))
        assert same(loaded.payloads[1][0], part(whole, 3, 5))
        assert same(loaded.payloads[1][1], state(1))
        found = {n.id: (n.parent, n.tokens) for n in disk.nodes()}
        assert found == {3: (0, [1, 2]), 4: (3, [3]), 1: (4, [4, 5]), 2: (1, [6])}
        assert watch.read((3, False, True)).failed == [3]  # the state is at the end of 1
        check(settled(disk), tmp_path)
        disk.close(5)
        disk = tier(tmp_path)
        watch = Watch(disk)
    disk.close(5)


def test_restart_knows_the_tree_without_reading(tmp_path: Path) -> None:
    now = 1000.0
    disk = tier(tmp_path, clock=lambda: now)
    disk.put(1, 0, "a", [1, 2], segment(1, 2), None)
    disk.put(2, 1, "a", [3], segment(2, 1), state(2))
    settled(disk)
    now = 2000.0
    disk.touch([1, 77])
    disk.close(5)
    disk = tier(tmp_path)
    first, second = disk.nodes()
    assert first == StoredNode(1, 0, "a", [1, 2], first.file, 0, 2, None, 2000.0)
    assert second == StoredNode(2, 1, "a", [3], second.file, 0, 1, second.checkpoint, 1000.0)
    assert None not in (first.file, second.file, second.checkpoint)
    assert same(Watch(disk).one(2, checkpoint=True), state(2))
    disk.put(3, 2, "a", [4], segment(3, 1), None)
    check(settled(disk), tmp_path)
    disk.close(5)


def test_what_waits_to_be_written_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    write = disk_files.write
    monkeypatch.setattr(disk_files, "write", lambda *a, **k: (go.wait(PATIENCE), write(*a, **k))[1])
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1, 2, 3], segment(1, 3), state(1))
    disk.split(1, 1, 2)
    assert disk.backlog > 0
    assert same(watch.one(2), part(segment(1, 3), 0, 1))
    assert same(watch.one(1, checkpoint=True), state(1))
    disk.forget([1])
    assert watch.read((1, True, False), (2, True, False)).failed == [1]
    go.set()
    assert watch.until(Stored) == Stored(2, True, False)
    assert disk.backlog == 0 and [n.id for n in disk.nodes()] == [2]
    check(disk, tmp_path)
    disk.close(5)


def test_checkpoint_comes_later(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1, 2], None, None)
    assert watch.until(Stored) == Stored(1, False, False)
    disk.put_checkpoint(1, state(1))
    assert watch.until(Stored, lambda e: e.checkpoint) == Stored(1, False, True)
    disk.put(1, 0, "", [1, 2], segment(1, 2), state(99))
    assert watch.until(Stored, lambda e: e.segment) == Stored(1, True, True)
    assert same(watch.one(1, checkpoint=True), state(1))
    assert same(watch.one(1), segment(1, 2))
    disk.put_checkpoint(5, state(5))
    assert watch.until(Dropped) == Dropped([5])
    check(disk, tmp_path)
    disk.close(5)


def test_forget_takes_what_is_below(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    for node, parent in ((1, 0), (2, 1), (3, 2), (4, 1)):
        disk.put(node, parent, "", [node], segment(node, 1), None)
    settled(disk).forget([2, 50])
    assert watch.until(Dropped) == Dropped([3])
    assert {n.id for n in settled(disk).nodes()} == {1, 4}
    check(disk, tmp_path)
    disk.put(6, 3, "", [1], segment(6, 1), None)  # its parent is gone
    disk.split(3, 1, 7)
    assert watch.of(Dropped)[1:] == [Dropped([6]), Dropped([7])]
    disk.close(5)


def test_clear(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    for node in range(1, 300):
        disk.put(node, node - 1, "", [node] * 50, segment(node, 50), None)
    settled(disk)
    full = disk.bytes
    disk.clear()
    disk.put(1000, 0, "", [1], segment(1000, 1), None)
    settled(disk)
    assert [n.id for n in disk.nodes()] == [1000] and disk.bytes < full // 10
    check(disk, tmp_path)
    disk.close(5)
    disk = tier(tmp_path)
    assert same(Watch(disk).one(1000), segment(1000, 1))
    disk.close(5)


def test_a_read_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", [1, 2], segment(1, 2), None)
    settled(disk)
    go = threading.Event()
    read = disk_files.read
    monkeypatch.setattr(disk_files, "read", lambda *a: (go.wait(PATIENCE), read(*a))[1])
    disk.read(7, [(1, True, False)])
    disk.forget([1])
    settled(disk)
    go.set()
    loaded = watch.until(PayloadsRead)
    assert loaded.payloads is not None and same(loaded.payloads[1][0], segment(1, 2))
    assert until(lambda: not list(home(tmp_path).glob("*.safetensors")))
    check(disk, tmp_path)
    disk.close(5)


def test_a_long_backlog_drops_puts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = disk_files.write
    monkeypatch.setattr(disk_files, "write", lambda *a, **k: (go.wait(PATIENCE), write(*a, **k))[1])
    disk = tier(tmp_path, backlog=100_000)
    watch = Watch(disk)
    for node in range(1, 5):
        disk.put(node, 0, "", [1] * 1000, segment(node, 1000, 8), None)
        assert disk.backlog <= 100_000
    disk.put(9, 4, "", [1], segment(9, 1), None)
    assert watch.of(Dropped) == [Dropped([3]), Dropped([4]), Dropped([9])]
    disk.put_checkpoint(1, state(1, 10_000))
    go.set()
    assert watch.until(Stored, lambda e: e.node == 1) == Stored(1, True, False)
    assert {n.id for n in settled(disk).nodes()} == {1, 2}
    disk.close(5)


def test_wakeup(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    woken = threading.Event()
    disk.set_wakeup(woken.set)
    disk.put(1, 0, "", [1], segment(1, 1), None)
    assert woken.wait(PATIENCE) and Watch(disk).until(Stored).node == 1
    woken.clear()
    disk.read(1, [(1, True, False)])
    assert woken.wait(PATIENCE)
    disk.close(5)


def test_close_writes_what_waits(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    for node in range(1, 101):
        disk.put(node, node - 1, "", [node], segment(node, 1), None)
    disk.close(PATIENCE)
    disk = tier(tmp_path)
    assert [n.id for n in disk.nodes()] == list(range(1, 101))
    disk.close(5)
    disk.close(5)


def test_close_stops_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk_files.write
    monkeypatch.setattr(disk_files, "write", lambda *a, **k: (time.sleep(0.02), write(*a, **k))[1])
    disk = tier(tmp_path)
    for node in range(1, 301):
        disk.put(node, node - 1, "", [node], segment(node, 1), None)
    disk.close(0.1)
    disk = tier(tmp_path)
    assert len(disk.nodes()) < 300
    check(disk, tmp_path)
    disk.close(5)


def test_one_server_per_folder(tmp_path: Path) -> None:
    first = tier(tmp_path)
    with pytest.raises(
        DiskUnavailable, match="another server; this one keeps prefixes in memory only"
    ):
        tier(tmp_path)
    other = tier(tmp_path, mark="f" * 64)
    first.close(5)
    tier(tmp_path).close(5)
    other.close(5)


def test_a_budget_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskUnavailable, match="at least"):
        DiskTier(tmp_path, MARK, 1000)
