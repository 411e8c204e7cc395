"""Prompts that come in small pieces leave no small nodes, and what must stay apart does."""

from __future__ import annotations

import pytest
from cache.plain_store import Whole

from millrace.cache.merging import LEAST, MOST

PLENTY = 1 << 30


def _lengths(whole: Whole) -> list[int]:
    return sorted(len(n.tokens) for n in whole.index.nodes)


@pytest.mark.parametrize("chunk", [1, 8, 100, 255, 256, 700])
def test_a_prompt_in_chunks_leaves_nodes_of_at_least_256_tokens_and_one_tail(chunk: int) -> None:
    whole = Whole("cuttable", PLENTY)
    prompt = list(range(3000))
    for end in [*range(chunk, len(prompt), chunk), len(prompt)]:
        whole.keep("", prompt[:end])
    whole.check()
    assert all(n >= LEAST for n in _lengths(whole)[1:])
    found = whole.restore("", prompt)
    assert found is not None and found.at == len(prompt) - 1


def test_a_conversation_in_short_turns_leaves_few_nodes() -> None:
    whole = Whole("cuttable", PLENTY, disk=PLENTY)
    prompt: list[int] = []
    for turn in range(80):
        prompt = [*prompt, *range(1000 * turn, 1000 * turn + 20)]
        whole.restore("", prompt)
        whole.keep("", prompt)
        whole.now += 10
        whole.tick(idle=True)
        whole.now += 10
        whole.tick(idle=True)
        whole.hear()
    whole.check()
    assert all(n >= LEAST for n in _lengths(whole)[1:])
    assert sorted(len(n.tokens) for n in whole.store.disk.values()) == _lengths(whole)


def test_where_prompts_part_nodes_may_be_small() -> None:
    whole = Whole("cuttable", PLENTY)
    head = list(range(10))
    whole.keep("", [*head, *range(100, 200)])
    whole.keep("", [*head, *range(200, 300)])
    assert _lengths(whole) == [10, 100, 100]


def test_a_head_with_one_child_left_becomes_one_with_it() -> None:
    whole = Whole("cuttable", 2 * 108 * 300)
    head = list(range(10))
    whole.keep("", [*head, *range(1000, 1200)])
    whole.now += 10_000
    whole.keep("", [*head, *range(2000, 2200)])
    whole.keep("", list(range(5000, 5290)))
    whole.check()
    assert _lengths(whole) == [210, 290]


def test_asking_for_a_part_of_what_is_known_cuts_nothing() -> None:
    whole = Whole("cuttable", PLENTY)
    whole.keep("", list(range(100)))
    assert whole.keep("", list(range(40))) == 0
    assert _lengths(whole) == [100]


def test_a_checkpoint_keeps_its_place() -> None:
    whole = Whole("hybrid", PLENTY)
    for end in range(10, 101, 10):
        whole.keep("", list(range(end)), state=end % 50 == 0, boundary=False)
    assert _lengths(whole) == [50, 50]
    found = whole.restore("", list(range(80)))
    assert found is not None and (found.at, found.hit) == (50, "checkpoint")


def test_state_on_its_way_from_the_disk_stays_as_it_is() -> None:
    whole = Whole("cuttable", PLENTY, disk=PLENTY)
    head = list(range(100))
    whole.keep("", head)
    for _ in range(2):
        whole.now += 10
        whole.tick(idle=True)
    whole.hear()
    node = whole.index.nodes[0]
    whole.index._residency.give_up([], node, "segment", whole.now)
    whole.store.segments.clear()
    ticket = whole.fetch("", [*head, 1])
    assert ticket is not None
    whole.keep("", [*head, 7, 8, 9])
    assert _lengths(whole) == [3, 100]
    whole.store.finish_reads()
    whole.hear()
    found = whole.restore("", [*head, 1], ticket)
    assert found is not None and (found.at, found.hit) == (100, "disk")
    whole.check()
    assert _lengths(whole) == [103]


def test_no_merge_copies_much() -> None:
    whole = Whole("cuttable", PLENTY)
    long = list(range(MOST))
    whole.keep("", [*long, 1])
    whole.keep("", [*long[:5], 9, 9])
    assert _lengths(whole) == [2, 5, MOST - 4]
