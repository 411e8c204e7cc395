"""Pages that sequences and the prefix cache share: every place holds what it should, whoever goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cache.index import PrefixIndex
from millrace.cache.operations import Clear, Operation, Source
from millrace.cache.planner import Layers
from millrace.cache.sizes import StateSizes
from millrace.cache.state import Layout, StateCheckpoint
from millrace.cache.store import SegmentStore
from millrace.engine.page_segments import PageSegments
from millrace.paging.pool import PagePool
from millrace.paging.table import PageCopy, PageTable

PAGE = 4
LAYOUT = Layout(("KVCache",), (0,), (), Layers(False))
TOKEN = 8
"""Bytes of a token's state: a key and a value, one number each."""


class Numbers:
    """One layer whose keys are numbers: a prefix's own number for each token's state."""

    page = PAGE

    def __init__(self) -> None:
        self.pool = PagePool(1)
        self.numbers = np.zeros((1, PAGE), np.int32)

    def page_bytes(self, group: int) -> int:
        return PAGE * TOKEN

    def reserve(self, count: int) -> None:
        if count > self.pool.free:
            size = len(self.pool) + count
            self.numbers = np.concatenate(
                [self.numbers, np.zeros((size - len(self.pool), PAGE), np.int32)]
            )
            self.pool.grow(size)

    def copy_page(self, copy: PageCopy, group: int) -> None:
        self.numbers[copy.target, : copy.tokens] = self.numbers[copy.source, : copy.tokens]

    def read(
        self, layer: int, pages: Sequence[int], begin: int, end: int
    ) -> tuple[mx.array, mx.array]:
        flat = self.numbers[list(pages)].reshape(-1)[begin:end]
        found = mx.array(flat[None, None, :, None].copy())
        return found, found

    def write(
        self, layer: int, pages: Sequence[int], begin: int, keys: mx.array, values: mx.array
    ) -> None:
        for n, number in enumerate(np.array(keys).reshape(-1).tolist()):
            self.numbers[pages[(begin + n) // PAGE], (begin + n) % PAGE] = number


class Running:
    """A sequence that runs on pages."""

    def __init__(self, layers: Numbers) -> None:
        self.layers = layers
        self.table = PageTable(layers.pool, PAGE)
        self.tokens: list[int] = []

    def pairs(self, start: int, end: int) -> list[tuple[mx.array, mx.array]]:
        raise NotImplementedError

    def pages(self, start: int, end: int) -> list[int]:
        return self.table.keep(start, end)

    def checkpoint(self) -> StateCheckpoint:
        raise NotImplementedError


class World:
    def __init__(self, memory: int) -> None:
        self.layers = Numbers()
        self.how = PageSegments(self.layers, LAYOUT, self.layers.pool, 0, self.layers.reserve)
        self.store = SegmentStore(lambda: [None], LAYOUT, None, self.how)
        self.index = PrefixIndex(Layers(False), StateSizes(TOKEN, page=PAGE), memory)
        self.running: list[Running] = []
        self.numbers: dict[tuple[int, ...], int] = {}
        self.now = 0.0

    def number(self, tokens: Sequence[int]) -> int:
        return self.numbers.setdefault(tuple(tokens), len(self.numbers) + 1)

    def do(self, out: list[Operation], source: Any = None) -> Any:
        made = None
        for operation in out:
            made = self.store.execute(operation, source) or made
        return made

    def begin(self, tokens: list[int]) -> None:
        """A prompt comes: what is found is taken over, the rest is run."""
        out: list[Operation] = []
        found = self.index.restore(out, 1, "", tokens, None, self.now)
        made = self.do(out)
        one = Running(self.layers)
        if found is not None:
            self.layers.reserve(1)
            used = self.layers.pool.used
            copy = one.table.adopt(made.pages, found.at)
            assert self.layers.pool.used - used == (found.at % PAGE > 0)
            if copy is not None:
                self.layers.copy_page(copy, 0)
            one.tokens = tokens[: found.at]
        self.run(one, tokens[len(one.tokens) :])
        self.running.append(one)

    def run(self, one: Running, tokens: list[int]) -> None:
        self.layers.reserve(one.table.lacks(len(tokens)))
        one.table.extend(len(tokens))
        for token in tokens:
            at = len(one.tokens)
            one.tokens.append(token)
            self.layers.numbers[one.table.pages[at // PAGE], at % PAGE] = self.number(one.tokens)

    def cut(self, one: Running, length: int) -> None:
        self.layers.reserve(one.table.copies_at(length))
        if (copy := one.table.cut(length)) is not None:
            self.layers.copy_page(copy, 0)
        del one.tokens[length:]

    def fork(self, one: Running) -> None:
        self.layers.reserve(1)
        other = Running(self.layers)
        other.table, copy = one.table.fork()
        if copy is not None:
            self.layers.copy_page(copy, 0)
        other.tokens = list(one.tokens)
        self.running.append(other)

    def keep(self, one: Running, length: int) -> None:
        out: list[Operation] = []
        tokens = one.tokens[:length]
        source = Source("row", 1)
        self.index.keep(out, source, "", tokens, state=False, boundary=False, now=self.now)
        used = self.layers.pool.used
        self.do(out, one)
        assert self.layers.pool.used <= used, "keeping takes no page"

    def end(self, one: Running) -> None:
        self.running.remove(one)
        one.table.release()

    def check(self) -> None:
        self.index.check()
        self.layers.pool.check()
        assert self.index.state_bytes == self.store.nbytes
        for one in self.running:
            for at in range(len(one.tokens)):
                found = self.layers.numbers[one.table.pages[at // PAGE], at % PAGE]
                assert found == self.numbers[tuple(one.tokens[: at + 1])]
        owned = {page for one in self.running for page in one.table.pages}
        kept = {p for s in self.store._segments.values() for p in s.pages}
        assert self.layers.pool.used == len(owned | kept)
        assert self.layers.pool.running == len(owned)
        assert len(kept) * PAGE * TOKEN <= self.store.nbytes, "more is held than is counted"
        for node in self.index.nodes:
            line = [t for n in node.line() for t in n.tokens]
            segment = self.store._segments[node.id]
            first = segment.start // PAGE * PAGE
            # Its first page holds all that stands before it there.
            for at in range(first, node.end):
                page = segment.pages[(at - first) // PAGE]
                assert self.layers.numbers[page, at % PAGE] == self.numbers[tuple(line[: at + 1])]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([200, 1500, 100_000]))
def test_whoever_comes_and_goes_every_place_is_right(seed: int, memory: int) -> None:
    dice = random.Random(seed)
    world = World(memory)
    for _ in range(60):
        world.now += dice.random()
        one = dice.choice(world.running) if world.running else None
        match dice.randrange(8):
            case 0 | 1:
                old = list(dice.choice(list(world.numbers))) if world.numbers else []
                old = old[: dice.randrange(len(old) + 1)]
                world.begin([*old, *(dice.randrange(3) for _ in range(dice.randrange(2, 9)))])
            case 2 | 3 if one is not None:
                world.run(one, [dice.randrange(3) for _ in range(dice.randrange(1, 6))])
            case 4 if one is not None:
                world.keep(one, dice.randrange(1, len(one.tokens) + 1))
            case 5 if one is not None:
                world.keep(one, len(one.tokens))
                world.end(one)
            case 6 if one is not None:
                world.cut(one, dice.randrange(max(0, len(one.tokens) - 6), len(one.tokens)) + 1)
            case 7 if one is not None and len(world.running) < 6:
                world.fork(one)
        world.check()
    for one in list(world.running):
        world.end(one)
    world.do([Clear()])
    assert world.layers.pool.used == 0


@pytest.mark.parametrize("at", [4, 6, 7])
def test_what_comes_from_disk_is_written_behind_the_tail_of_its_parent(at: int) -> None:
    world = World(100_000)
    world.begin([1] * 11)
    (one,) = world.running
    whole = world.how.keep(one, 0, 11)
    upper, lower = world.how.cut(whole, at)
    written = world.how.payload(lower)
    world.how.release(lower)
    world.end(one)
    loaded = world.how.load(written, at, upper)
    joined = world.how.join(upper, loaded)
    flat = world.layers.numbers[joined.pages].reshape(-1)[:11]
    assert flat.tolist() == [world.numbers[(1,) * n] for n in range(1, 12)]
    world.how.release(joined)
    world.layers.pool.check()
    assert world.layers.pool.used == 0


def test_a_prefix_of_sixteen_sequences_exists_once() -> None:
    world = World(100_000)
    prompt = [dice % 3 for dice in range(400)]
    world.begin(prompt)
    world.keep(world.running[0], 400)
    for n in range(15):
        world.begin([*prompt, n])
    # One page for each sequence's own tokens.
    assert world.layers.pool.used <= 400 // PAGE + 16
    world.check()
