"""What the index hears of several ranks' disks."""

from __future__ import annotations

import random

from millrace.cache.observations import (
    DiskTrouble,
    DiskUsage,
    FoundOnDisk,
    GoneFromDisk,
    ReadFromDisk,
    ReadNode,
    StoredOnDisk,
)
from millrace.engine.ranks.agreement import Agreement, agreed


def _found(node: int, parent: int = 0, tokens: tuple[int, ...] = (1, 2)) -> FoundOnDisk:
    return FoundOnDisk(node, parent, "", tokens, False, 1.0)


def test_only_what_all_ranks_have_is_known_at_the_start() -> None:
    first = [_found(1), _found(2, 1), _found(3, 2), _found(4), _found(5)]
    second = [_found(1), _found(3, 2), _found(4, tokens=(9,)), _found(5), _found(6)]
    # 2 is missing on the second, 3 has no parent then, and 4 is another one there.
    assert [n.node for n in agreed([first, second])] == [1, 5]
    assert [n.node for n in agreed([first])] == [1, 2, 3, 4, 5]
    assert agreed([first, []]) == []


def test_a_node_is_stored_when_all_have_stored_it() -> None:
    agreement = Agreement(3)
    assert agreement.heard(1, [StoredOnDisk(7, True)]) == []
    assert agreement.heard(1, [StoredOnDisk(7, True)]) == []
    assert agreement.heard(0, [StoredOnDisk(7, True)]) == []
    assert agreement.heard(2, [StoredOnDisk(7, False)]) == [StoredOnDisk(7, False)]
    assert agreement.heard(2, [StoredOnDisk(7, True)]) == []
    assert agreement.heard(0, [StoredOnDisk(7, True)]) == [StoredOnDisk(7, True)]


def test_a_node_is_gone_as_soon_as_one_has_lost_it() -> None:
    agreement = Agreement(2)
    agreement.heard(0, [StoredOnDisk(7, False)])
    assert agreement.heard(1, [GoneFromDisk((7,))]) == [GoneFromDisk((7,))]
    # What was said of it before does not count any more.
    assert agreement.heard(1, [StoredOnDisk(7, False)]) == []


def test_what_is_read_is_what_all_have_read_alike() -> None:
    agreement = Agreement(2)
    mine = ReadFromDisk(
        1, (ReadNode(1, 5, True), ReadNode(2, 6, True), ReadNode(3, 7, False)), (9,)
    )
    theirs = ReadFromDisk(1, (ReadNode(1, 5, False), ReadNode(2, 4, True)), (8,))
    assert agreement.heard(0, [mine]) == []
    (read,) = agreement.heard(1, [theirs])
    assert isinstance(read, ReadFromDisk)
    assert read.nodes == (ReadNode(1, 5, False),)
    assert set(read.failed) == {2, 3, 8, 9}


def test_the_fullest_disk_counts_and_troubles_say_whose_they_are() -> None:
    agreement = Agreement(2)
    assert agreement.heard(0, [DiskUsage(5, 0)]) == [DiskUsage(5, 0)]
    assert agreement.heard(1, [DiskUsage(3, 2)]) == [DiskUsage(5, 2)]
    assert agreement.heard(1, [DiskUsage(4, 2)]) == []
    assert agreement.heard(1, [DiskTrouble("full", True)]) == [DiskTrouble("Rank 1: full", True)]
    assert agreement.heard(0, [DiskTrouble("full")]) == [DiskTrouble("full")]


def test_in_whatever_order_ranks_are_heard_nothing_stays_behind() -> None:
    dice = random.Random(3)
    for _ in range(50):
        agreement = Agreement(3)
        said = [(rank, node) for rank in range(3) for node in range(1, 9)]
        dice.shuffle(said)
        out = [o for rank, node in said for o in agreement.heard(rank, [StoredOnDisk(node, True)])]
        assert sorted(o.node for o in out if isinstance(o, StoredOnDisk)) == list(range(1, 9))
        assert not agreement._stored
