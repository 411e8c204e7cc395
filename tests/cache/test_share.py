"""One prompt has half of the memory at most: whoever sends a whole book flushes nobody else."""

from __future__ import annotations

import pytest
from cache.plain_store import SHAPES, Whole

from millrace.cache.observations import FoundOnDisk

MEMORY = 108 * 2000
"""Room for 2,000 tokens of the cuttable shape."""


def _others(whole: Whole, count: int) -> list[list[int]]:
    prompts = [[1000 * i + t for t in range(100)] for i in range(1, count + 1)]
    for prompt in prompts:
        whole.now += 1
        whole.keep("", prompt)
    return prompts


def _found(whole: Whole, prompt: list[int]) -> int:
    return whole.index.known("", [*prompt, 0])


@pytest.mark.parametrize("chunk", [8, 500, 100_000])
def test_of_a_prompt_larger_than_the_cache_the_head_is_kept(chunk: int) -> None:
    whole = Whole("cuttable", MEMORY)
    others = _others(whole, 10)
    book = list(range(500_000, 506_000))
    whole.now += 1
    kept = sum(whole.keep("", book[:end]) for end in [*range(chunk, len(book), chunk), len(book)])
    assert kept == 1000 == _found(whole, book)
    assert all(_found(whole, prompt) == 100 for prompt in others)
    whole.check()


def test_a_full_cache_gives_a_large_prompt_no_more_than_its_share() -> None:
    whole = Whole("cuttable", MEMORY)
    others = _others(whole, 20)
    for books in range(3):
        first = 500_000 + 10_000 * books
        book = list(range(first, first + 6000))
        for end in range(50, 6001, 50):
            whole.now += 0.01
            whole.keep("", book[:end])
        whole.check()
        # The share, and the little more that is made free at once.
        left = sum(_found(whole, prompt) for prompt in others)
        if not books:
            assert left >= 900


def test_of_a_conversation_that_outgrows_its_share_the_beginning_stays() -> None:
    whole = Whole("cuttable", MEMORY)
    talk: list[int] = []
    for turn in range(30):
        talk = [*talk, *range(10_000 * turn, 10_000 * turn + 100)]
        whole.keep("", talk)
    assert _found(whole, talk) == 1000
    whole.check()


@pytest.mark.parametrize("shape", ["hybrid", "recurrent"])
def test_state_at_the_end_takes_the_place_of_state_on_the_way(shape: str) -> None:
    sizes = SHAPES[shape][1]
    room = sizes.segment(0, 400) + 8 * 400 + 5 * sizes.flat
    whole = Whole(shape, 2 * room)
    prompt = list(range(400))
    for end in range(50, 351, 50):
        whole.keep("", prompt[:end], boundary=False)
    whole.keep("", prompt, boundary=True)
    whole.check()
    assert _found(whole, prompt) == 400
    assert sum(n.checkpoint for n in whole.index.nodes) <= 5


def test_no_more_comes_back_from_disk_than_a_share() -> None:
    whole = Whole("cuttable", MEMORY, disk=1 << 30)
    book = list(range(1000))
    whole.keep("", book)
    for _ in range(2):
        whole.now += 10
        whole.tick(idle=True)
    whole.hear()
    disk = whole.store.disk
    small = Whole("cuttable", MEMORY // 2, disk=1 << 30)
    small.store.disk = disk
    for id, n in disk.items():
        small.index.observe([], FoundOnDisk(id, 0, "", tuple(n.tokens), False, 1.0), 0.0)
    assert small.index.known("", [*book, 1]) == 500
    ticket = small.fetch("", [*book, 1])
    assert ticket is not None
    small.store.finish_reads()
    small.hear()
    small.check()
