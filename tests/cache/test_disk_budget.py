"""The budget: never exceeded, spent on what was used last, shared by the models of one folder."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from cache.disk_bench import (
    MIB,
    PATIENCE,
    Watch,
    check,
    home,
    part,
    same,
    segment,
    settled,
    size_on_disk,
    tier,
)
from hypothesis import given
from hypothesis import strategies as st

from millrace.cache.disk import Dropped, Stored, Trouble
from millrace.cache.disk import folder as disk_folder
from millrace.cache.disk import writer as disk_writer
from millrace.cache.disk.budget import Candidate, File, plan, score


@dataclass
class Item:
    id: int
    used: float
    size: int
    parent: int = 0
    held: bool = False
    file: tuple[int, int] | None = None
    """The file and its size, where it is not one of its own."""


def _plan(items: list[Item], need: int, spare: int = 0, now: float = 100) -> list[int]:
    files = {i.id: i.file or (-i.id, i.size) for i in items}
    users = Counter(f for f, _ in files.values())
    children = Counter(i.parent for i in items)
    nodes = {
        i.id: Candidate(
            i.id,
            i.parent,
            children[i.id],
            i.used,
            i.size,
            (File(*files[i.id], users[files[i.id][0]]),),
        )
        for i in items
        if not i.held
    }
    return plan([n for n in nodes.values() if not n.children], nodes.get, need, spare, now)


def test_the_oldest_leaf_goes_first() -> None:
    items = [Item(1, 10, 100), Item(2, 50, 100, parent=1), Item(3, 20, 100), Item(4, 60, 100)]
    assert _plan(items, 1) == [3]
    assert _plan(items, 150) == [3, 2]
    assert _plan(items, 250) == [3, 2, 1]
    assert _plan(items, 401) == []


def test_sixteen_times_the_size_weighs_like_twice_the_age() -> None:
    assert score(99, 16 * MIB) == pytest.approx(score(199, MIB))
    assert _plan([Item(1, 0, MIB), Item(2, 20, 16 * MIB)], 1) == [2]
    assert _plan([Item(1, 0, MIB), Item(2, 80, 16 * MIB)], 1) == [1]


def test_spare_room_is_not_bought_with_large_leaves() -> None:
    assert _plan([Item(1, 0, 100), Item(2, 10, 20), Item(3, 20, 500)], 90, 50) == [1, 2]


def test_a_shared_file_comes_free_with_its_last_user() -> None:
    items = [
        Item(1, 50, 30, file=(7, 100)),
        Item(2, 0, 70, parent=1, file=(7, 100)),
        Item(3, 90, 100),
    ]
    assert _plan(items, 100) == [2, 1]


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(0, 100), st.integers(0, 9000), st.booleans()),
        max_size=30,
    ),
    st.integers(1, 60_000),
    st.integers(0, 5000),
)
def test_plans_keep_the_tree_whole(
    shape: list[tuple[int, float, int, bool]], need: int, spare: int
) -> None:
    items = [
        Item(i, used, size, min(parent, i - 1), held, (i // 3, 6000))
        for i, (parent, used, size, held) in enumerate(shape, 1)
    ]
    order = _plan(items, need, spare)
    gone: set[int] = set()
    for id in order:
        assert all(i.id in gone for i in items if i.parent == id)
        gone.add(id)
    assert not any(i.held for i in items if i.id in gone)
    kept = {i.file for i in items if i.id not in gone}
    freed = 6000 * len({i.file for i in items} - kept)
    assert freed >= need if order else not gone


def test_ten_thousand_inserts_keep_to_the_budget(tmp_path: Path) -> None:
    budget = 6 * MIB
    disk = tier(tmp_path, budget, sync=False)
    watch = Watch(disk)
    largest = 0
    for node in range(1, 10_001):
        parent = node - 1 if node % 4 else 0
        disk.put(node, parent, "", [node] * 5, segment(node, 5, 20 * (node % 30)), None)
        if not node % 7:
            disk.split(node, 2, 20_000 + node)
        if not node % 20:
            while disk.backlog > 100_000:
                time.sleep(0.0005)
            largest = max(largest, size_on_disk(tmp_path))
            assert largest <= budget
    settled(disk)
    assert size_on_disk(tmp_path) <= disk.bytes <= budget
    assert largest > budget // 2
    stored = {e.node for e in watch.of(Stored)}
    dropped = [id for e in watch.of(Dropped) for id in e.nodes]
    there = {n.id for n in disk.nodes()}
    assert there == stored - set(dropped) and len(there) > 100
    check(disk, tmp_path)
    node = max(n.id for n in disk.nodes() if n.id <= 10_000 and n.id % 7)
    assert same(watch.one(node), segment(node, 5, 20 * (node % 30)))
    disk.close(5)


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    now = 1000.0
    disk = tier(tmp_path, 12 * MIB, clock=lambda: now)
    watch = Watch(disk)
    for node in range(1, 9):
        now += 100
        disk.put(node, 0, "", [node] * 1000, segment(node, 1000, 512), None)  # 2 MiB each
        settled(disk)
        if node == 4:
            now += 50
            disk.touch([1])
    dropped = [id for e in watch.of(Dropped) for id in e.nodes]
    assert dropped[:2] == [2, 3] and 1 not in dropped[:3]
    assert {n.id for n in disk.nodes()} == set(range(1, 9)) - set(dropped)
    disk.close(5)


def test_what_can_never_fit_is_dropped_without_evicting(tmp_path: Path) -> None:
    disk = tier(tmp_path, 4 * MIB)
    watch = Watch(disk)
    disk.put(1, 0, "", [1], segment(1, 1), None)
    disk.put(2, 1, "", [1] * 1000, segment(2, 1000, 2000), None)
    disk.put(3, 2, "", [1], segment(3, 1), None)
    settled(disk)
    assert watch.dropped() == {2, 3} and "room" in watch.until(Trouble).message
    assert [n.id for n in disk.nodes()] == [1]
    check(disk, tmp_path)
    disk.close(5)


def test_a_smaller_budget_at_restart(tmp_path: Path) -> None:
    disk = tier(tmp_path, 32 * MIB)
    for node in range(1, 11):
        disk.put(node, node - 1, "", [node] * 1000, segment(node, 1000, 512), None)
    settled(disk).close(5)
    disk = tier(tmp_path, 8 * MIB)
    assert size_on_disk(tmp_path) <= disk.bytes <= 8 * MIB
    assert [n.id for n in disk.nodes()] == list(range(1, len(disk.nodes()) + 1))
    assert disk.entries >= 2
    check(disk, tmp_path)
    disk.close(5)


def test_free_space_is_left_on_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * MIB
    disk = tier(tmp_path, 64 * MIB, keep_free=50 * MIB)
    watch = Watch(disk)
    monkeypatch.setattr(
        disk_folder.shutil,
        "disk_usage",
        lambda _: type("Usage", (), {"free": free - size_on_disk(tmp_path)}),
    )
    disk.put(1, 0, "", [1] * 1000, segment(1, 1000, 512), None)
    watch.until(Stored)
    free = 54 * MIB
    disk.put(2, 0, "", [2] * 1000, segment(2, 1000, 512), None)
    assert watch.until(Dropped) == Dropped([1])  # the older state makes room for the newer
    watch.until(Stored, lambda e: e.node == 2)
    free = 40 * MIB
    disk.put(3, 0, "", [3] * 1000, segment(3, 1000, 512), None)
    watch.until(Dropped, lambda e: e.nodes == [3])
    assert [n.id for n in disk.nodes()] == [2]
    disk.close(5)


def test_a_small_rest_of_a_large_file_is_cut_out(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    watch = Watch(disk)
    disk.put(1, 0, "", list(range(1000)), segment(1, 1000, 512), None)
    disk.split(1, 100, 2)
    disk.split(2, 10, 3)
    before = settled(disk).bytes
    disk.forget([1])
    settled(disk)
    assert disk.bytes < before // 4
    loaded = watch.read((3, True, False), (2, True, False))
    assert loaded.payloads is not None
    assert same(loaded.payloads[3][0], part(segment(1, 1000, 512), 0, 10))
    assert same(loaded.payloads[2][0], part(segment(1, 1000, 512), 10, 100))
    check(disk, tmp_path)
    disk.close(5)
    disk = tier(tmp_path)
    assert same(Watch(disk).one(2), part(segment(1, 1000, 512), 10, 100))
    check(disk, tmp_path)
    disk.close(5)


def _filled(tmp_path: Path, mark: str, nodes: int, age: float) -> None:
    disk = tier(tmp_path, 64 * MIB, mark)
    for node in range(1, nodes + 1):
        disk.put(node, 0, "", [node] * 1000, segment(node, 1000, 512), None)
    settled(disk).close(5)
    used = time.time() - age
    os.utime(home(tmp_path, mark) / "account", (used, used))


def test_models_not_in_use_give_way_the_oldest_first(tmp_path: Path) -> None:
    old, newer, third = "a" * 64, "b" * 64, "c" * 64
    _filled(tmp_path, newer, 3, age=1000)
    _filled(tmp_path, old, 3, age=2000)
    disk = tier(tmp_path, 16 * MIB, third)
    watch = Watch(disk)
    assert home(tmp_path, old).exists() and home(tmp_path, newer).exists()
    for node in range(1, 5):
        disk.put(node, 0, "", [node] * 1000, segment(node, 1000, 512), None)
        settled(disk)
        assert size_on_disk(tmp_path) <= 16 * MIB
    assert not home(tmp_path, old).exists() and home(tmp_path, newer).exists()
    assert not watch.of(Dropped)
    disk.close(5)


def test_models_unused_for_a_month_go(tmp_path: Path) -> None:
    _filled(tmp_path, "a" * 64, 1, age=31 * 86400)
    _filled(tmp_path, "b" * 64, 1, age=29 * 86400)
    stranger = tmp_path / ("d" * 16)
    stranger.mkdir()
    (stranger / "letters.txt").write_text("not ours")
    os.utime(stranger, (1, 1))
    tier(tmp_path, mark="c" * 64).close(5)
    assert not home(tmp_path, "a" * 64).exists() and home(tmp_path, "b" * 64).exists()
    assert (stranger / "letters.txt").read_text() == "not ours"


def test_two_running_models_share_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_writer, "TICK", 0.05)
    budget = 24 * MIB
    first = tier(tmp_path, budget, "a" * 64)
    for node in range(1, 20):
        first.put(node, 0, "", [node] * 1000, segment(node, 1000, 512), None)
    settled(first)
    assert first.bytes > budget * 3 // 4
    second = tier(tmp_path, budget, "b" * 64)
    watch = Watch(second)
    deadline = time.monotonic() + PATIENCE
    for node in count(1):  # the first looks only now and then whether it must give way
        second.put(node, 0, "", [node] * 1000, segment(node, 1000, 512), None)
        settled(second)
        assert size_on_disk(tmp_path) <= budget
        if (node >= 40 and second.bytes > budget // 3) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert budget // 3 < second.bytes <= budget // 2 and budget // 3 < first.bytes
    assert watch.of(Stored)
    first.close(5)
    second.close(5)
